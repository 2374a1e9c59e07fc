"""No text of any tool may raise: whatever a tool prints, the checks answer with checks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.host import checks
from hearth.host.checks import Output, Wanted
from hearth.host.probes import COMMANDS, FILES

NAMES = [*COMMANDS, *FILES, "disk"]
REAL = [
    '<?xml version="1.0" ?>\n<nvidia_smi_log><gpu id="00000000:C1:00.0"><product_name>',
    "</product_name><pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen>",
    "</gpu></nvidia_smi_log>",
    "\n0000:c1:00.0 VGA compatible controller: NVIDIA Corporation Device 2bb5 (rev a1)\n",
    "\n0000:c0:01.1 PCI bridge: AMD\n\t\tACSCtl:\tSrcValid+ ReqRedir+\n",
    "LnkCap:\tPort #0, Speed 32GT/s, Width x16\n\t\tLnkSta:\tSpeed 2.5GT/s, Width x8",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    "Max locked memory         8388608   unlimited   bytes\n",
    '{"ServerVersion": "28.1", "Runtimes": ["x"], "CDISpecDirs": 5}\n',
    '{"ServerVersion": null}\n',
    "/dev/nvme0n1p2 ext4 1000000000000 0 999999999999 1% /\n",
    "nvidia.com/gpu=0\n",
    "195:0 ../nvidia0\n",
    'ID=debian\nVERSION_ID="12"\n',
    "version:        580.159.04\nlicense: Dual MIT/GPL\n",
    "[always] madvise never",
    "DMA-FQ",
]
TEXTS = st.lists(st.one_of(st.sampled_from(REAL), st.text(max_size=80)), max_size=8).map("".join)
OUTPUTS = st.builds(
    Output, text=TEXTS, code=st.integers(-9, 255), problem=st.sampled_from(["", "not installed"])
)


@settings(max_examples=400, deadline=None)
@given(facts=st.dictionaries(st.sampled_from(NAMES), OUTPUTS), gpus=st.sampled_from([0, 1, 8]))
def test_any_text_gets_verdicts(facts: dict[str, Output], gpus: int) -> None:
    found = checks.judge(facts, Wanted(gpus=gpus))
    assert len({check.id for check in found}) == len(found)
    for check in found:
        assert "\n" not in check.seen
        assert len(check.seen) <= 400
        assert check.why or check.status is checks.Status.OK
        assert check.fix or check.status in (checks.Status.OK, checks.Status.SKIP)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=10),
        st.one_of(
            st.text(),
            st.none(),
            st.integers(),
            st.dictionaries(
                st.sampled_from(["text", "code", "problem"]),
                st.one_of(st.text(), st.none(), st.integers(), st.booleans()),
            ),
        ),
    )
)
def test_facts_of_any_json(data: dict[str, object]) -> None:
    assert set(checks.facts_from_json(data)) == set(data)


def test_the_same_verdicts_are_given_for_every_host() -> None:
    """A host without GPUs skips what one with GPUs has checked; nothing disappears."""
    with_gpus = {check.id for check in checks.judge({}, Wanted())}
    without = {check.id for check in checks.judge({}, Wanted(gpus=0))}
    assert with_gpus == without
