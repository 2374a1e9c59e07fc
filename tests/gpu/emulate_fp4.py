"""Makes FlashInfer's FP4 kernels do their work on a GPU older than Blackwell, for tests.

Their bodies are compiled for sm_100 and newer only: on a Hopper the call succeeds and writes nothing. Here
the guards are lowered to sm_90 and the e2m1 conversion instruction is replaced by cuda_fp4.h's own software
conversion, which rounds alike (to nearest, ties to even). Run it on a *copy* of the package.

    python emulate_fp4.py SITE_PACKAGES/flashinfer
"""

import re
import sys
from pathlib import Path

KERNELS = Path("data/csrc/nv_internal/tensorrt_llm/kernels")
HEADERS = ("quantization.cuh", "quantization_utils.cuh")
GUARD = re.compile(r"(__CUDA_ARCH__\s*>=\s*)1000\b")
# From the signature of a conversion to the end of its `#else return 0;`.
CONVERSION = re.compile(
    r"(?P<head>inline __device__ (?P<type>uint(?:32|64)_t) fp32_vec_to_e2m1"
    r"\((?P<arg>float2?) \(&array\)\[(?P<n>\d+)\]\) \{\n)"
    r"#if .*?#else.*?return 0;\n#endif\n",
    re.DOTALL,
)
# Decoding is only used by the 4over6 search, which has software fallbacks or isn't tested here.
DECODING = re.compile(r"(float2 e2m1x2_byte_\w+\([^)]*\)\s*\{\n\s*float2 result;\n#if [^\n]*>= )900(\))")


def conversion(match: re.Match[str]) -> str:
    """The same function in software. Element 2i goes to the low four bits of byte i."""
    pair = "array[i]" if match["arg"] == "float2" else "make_float2(array[2 * i], array[2 * i + 1])"
    count = int(match["n"]) if match["arg"] == "float2" else int(match["n"]) // 2
    return (
        f"{match['head']}  {match['type']} val = 0;\n#pragma unroll\n"
        f"  for (int i = 0; i < {count}; i++) {{\n"
        f"    val |= static_cast<{match['type']}>(\n"
        f"               __nv_cvt_float2_to_fp4x2({pair}, __NV_E2M1, cudaRoundNearest))\n"
        "           << (8 * i);\n  }\n  return val;\n"
    )


def emulate(package: Path) -> dict[str, int]:
    """Patch the headers in place; how many guards and conversions changed. Raises ValueError if none did."""
    counts = {"guards": 0, "conversions": 0}
    for name in HEADERS:
        path = package / KERNELS / name
        text, conversions = CONVERSION.subn(conversion, path.read_text())
        text, guards = GUARD.subn(r"\g<1>900", text)
        text = DECODING.sub(r"\g<1>1000\2", text)
        if conversions:
            text = text.replace("#pragma once\n", "#pragma once\n\n#include <cuda_fp4.h>\n", 1)
        counts["guards"] += guards
        counts["conversions"] += conversions
        path.unlink()  # it may be a link to the original
        path.write_text(text)
    if counts["conversions"] != 3 or counts["guards"] < 5:
        raise ValueError(f"{package}: unknown sources ({counts}); read quantization_utils.cuh again")
    return counts


if __name__ == "__main__":
    print(emulate(Path(sys.argv[1])))
