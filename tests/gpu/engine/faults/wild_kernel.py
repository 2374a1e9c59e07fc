"""A Triton kernel that writes to whatever address it is given."""

import triton
import triton.language as tl


@triton.jit
def wild(address):
    """Store one number at the address that lies at `address`."""
    tl.store(tl.load(address).to(tl.pointer_type(tl.float32)), 1.0)
