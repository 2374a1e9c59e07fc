"""Lets PyPI's torchvision be imported beside a CPU build of torch. Loaded by hearth_cpu_shims.pth.

PyPI's torchvision is linked to CUDA. Beside a CPU torch its operators can't be loaded, and its import
stops at `operator torchvision::nms does not exist`, though SGLang calls none of them for a text model.
"""

import sys
from importlib.machinery import PathFinder

_declared = []  # keeps the declaration alive as long as the process


class TorchvisionOps:
    """An import finder that finds nothing: it acts just before torchvision's first import."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Leave the import to the finders that follow."""
        if name == "torchvision" and not _declared:
            _declared.append(None)
            _declared.append(declare(PathFinder.find_spec(name)))


def declare(torchvision):
    """Declare the two operators torchvision looks up, if its own library can't be loaded."""
    import torch

    if torchvision is None:
        return None
    try:
        torch.ops.load_library(torchvision.submodule_search_locations[0] + "/_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for op in "nms", "qnms":
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


sys.meta_path.insert(0, TorchvisionOps)
