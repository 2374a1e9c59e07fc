"""*GPUs and host*: the machine under the engine."""

from monitoring.dashboards.panels import GREEN, HOST, RED, YELLOW, Panel, Query, Row, number, series
from monitoring.dashboards.serving import limit

TITLE, UID = "Hearth: GPUs and host", "hearth-gpus"
TEXT = "GPUs (nvitop-exporter or DCGM), their links and driver, and the host (node exporter)."


def of_host(name: str, legend: str = "{{host}}", more: str = "") -> Query:
    """A recording rule, for the chosen hosts."""
    return Query(f"{name}{{{HOST}{more}}}", legend)


def of_gpu(name: str, legend: str = "{{host}} GPU {{gpu}}") -> Query:
    """A recording rule that has a GPU."""
    return of_host(name, legend)


NOW = Row(
    "Now",
    (
        number("GPUs", "That the driver shows.", of_host("hearth:gpus:count")),
        number("GPUs expected", "Fewer than these are the alert GPUMissing.", limit("gpus")),
        number(
            "Driver",
            "Whether kernel module and library have one version.",
            of_host("hearth:driver_mismatch"),
            names=(("0", "matches", GREEN), ("1", "mismatch", RED)),
        ),
        number(
            "Unit",
            "Whether systemd has given up on hearth.service.",
            of_host("hearth:unit_failed"),
            names=(("0", "not failed", GREEN), ("1", "failed", RED)),
        ),
        number(
            "Faults",
            "GPUs that report a fault.",
            Query(f"sum by (host) (hearth_gpu_fault{{{HOST}}} > bool 0)"),
            steps=((None, GREEN), (1, RED)),
        ),
        number(
            "Least disk left",
            "Of the fullest file system.",
            Query(f"min by (host) (hearth:disk_free:ratio{{{HOST}}})"),
            "percentunit",
            steps=((None, RED), (0.1, YELLOW), (0.2, GREEN)),
        ),
    ),
)
GPUS = Row(
    "GPUs",
    (
        series(
            "Utilization",
            "Share of time in which a kernel ran.",
            of_gpu("hearth:gpu_utilization:ratio"),
            unit="percentunit",
            top=1,
        ),
        series("Memory in use", "On each GPU.", of_gpu("hearth:gpu_memory_used:bytes"), unit="bytes"),
        series("Memory free", "On each GPU.", of_gpu("hearth:gpu_memory_free:bytes"), unit="bytes"),
        series("Power", "Drawn by each GPU.", of_gpu("hearth:gpu_power:watts"), unit="watt"),
        series("Temperature", "Of each GPU.", of_gpu("hearth:gpu_temperature:celsius"), unit="celsius"),
        series("Clock", "Of the multiprocessors.", of_gpu("hearth:gpu_sm_clock:hertz"), unit="hertz"),
        series(
            "Slowed down",
            "1 while a GPU lowers its clocks to protect itself.",
            of_host("hearth:gpu_throttled", "{{host}} GPU {{gpu}} {{reason}}"),
            top=1,
        ),
        series(
            "At the power cap",
            "Share of the last 10 minutes; normal under load.",
            of_gpu("hearth:gpu_power_capped:avg10m"),
            unit="percentunit",
            top=1,
        ),
        series(
            "PCIe replays in an hour",
            "Errors on the link, and where PCIeReplay begins.",
            of_gpu("hearth:gpu_pcie_replays:increase1h"),
            limit("pcie_replays_per_hour"),
        ),
        series(
            "PCIe width",
            "Share of the lanes that the link could have.",
            of_gpu("hearth:gpu_pcie_width:ratio"),
            unit="percentunit",
            top=1,
        ),
        series(
            "Last grave Xid",
            "By DCGM; only Xids that speak of the GPU or its link.",
            of_gpu("hearth:gpu_xid"),
        ),
        series(
            "Faults",
            "By Hearth's own watch.",
            Query(f"max by (host, gpu) (hearth_gpu_fault{{{HOST}}})", "{{host}} GPU {{gpu}}"),
        ),
    ),
)
HOSTS = Row(
    "Host",
    (
        series("CPU", "Share in use.", of_host("hearth:cpu_busy:ratio_rate5m"), unit="percentunit", top=1),
        series(
            "Memory left",
            "Share that is available.",
            of_host("hearth:memory_available:ratio"),
            unit="percentunit",
            top=1,
        ),
        series(
            "Disk left",
            "Share of each file system, and where DiskLow begins.",
            of_host("hearth:disk_free:ratio", "{{host}} {{mountpoint}}"),
            limit("disk_free"),
            unit="percentunit",
            top=1,
        ),
        series(
            "Network",
            "Without the loopback.",
            of_host("hearth:network_receive:bytes_rate5m", "{{host}} in"),
            of_host("hearth:network_transmit:bytes_rate5m", "{{host}} out"),
            unit="Bps",
        ),
        series(
            "Scrapes",
            "1 for each page that Prometheus can read.",
            Query(f"min by (host, job) (up{{{HOST}}})", "{{host}} {{job}}"),
            top=1,
        ),
        series(
            "Age of the host metrics",
            "Above ten minutes: the alert ScrapeMissing.",
            of_host("hearth:host_metrics_age:seconds"),
            unit="s",
        ),
        Panel(
            "Driver versions",
            "Kernel module and user-space library.",
            (Query(f"hearth_host_driver_info{{{HOST}}}", "module {{module}}, library {{library}}"),),
            kind="stat",
            height=4,
            by_name=True,
        ),
    ),
)
ROWS = (NOW, GPUS, HOSTS)
