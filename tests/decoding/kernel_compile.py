"""Compiles the attention kernels for a GPU that need not be there. A test starts it as a separate process.

If Triton's interpreter is on, it replaces the compiler in the whole process.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from laserbatch.pipeline.decoding.attention.triton_attention import block_keys
from laserbatch.pipeline.decoding.attention.triton_kernel import attend, combine
from laserbatch.pipeline.decoding.model.layer_kernels import gate, rms_norm, rotate_and_store

INDEX_POINTERS = (
    "slots_ptr",
    "cu_seqlens_k_ptr",
    "num_committed_ptr",
    "cu_seqlens_q_ptr",
    "num_chain_ptr",
    "positions_ptr",
)
POINTERS = dict.fromkeys(INDEX_POINTERS, "*i32") | {
    "ancestors_ptr": "*i64", "log_sum_ptr": "*fp32", "parts_ptr": "*fp32",
}  # fmt: skip
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # the limit of a thread block
NUMBERS = {"scale": "fp32", "softcap": "fp32", "epsilon": "fp32", "update_epsilon": "fp32"}


def compile_kernel(kernel, architecture: int, dtype: str, **constants) -> CompiledKernel:
    """A kernel compiled to a "cubin", for pointers and strides with the alignment of a model's tensors."""
    names = kernel.arg_names
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        if name.isupper():
            signature[name] = "constexpr"
            continue
        if kernel is rotate_and_store and name in INDEX_POINTERS:
            signature[name] = "*i64"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = NUMBERS.get(name, "i32")
        if name.endswith("_ptr") or "stride" in name:
            attributes[(i,)] = [["tt.divisibility", 16]]
    if constants.get("IS_CUT") and kernel is attend:
        signature["out_ptr"] = "*fp32"
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32))


def main() -> None:
    cases = {
        80: ((1, False, 64, 256, torch.bfloat16),),
        90: ((4, True, 64, 128, torch.bfloat16), (4, True, 16, 128, torch.float32)),
    }
    for architecture, shapes in cases.items():
        for num_parts, has_more, rows, dim, dtype in shapes:
            compiled = compile_kernel(
                attend,
                architecture,
                {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype],
                SEQUENCES_BLOCK=256,
                IS_CUT=num_parts > 1,
                FOLDED=4,
                HEAD_DIM=dim,
                HEAD_BLOCK=dim,
                VALUE_DIM=dim,
                VALUE_BLOCK=dim,
                BLOCK_ROWS=rows,
                BLOCK_KEYS=block_keys(dim, dtype),
                HAS_WINDOW=has_more,
                HAS_SOFTCAP=has_more,
                HAS_SINKS=has_more,
                IN_FLOAT32=False,
            )
            shared_bytes = compiled.metadata.shared
            assert shared_bytes <= SHARED_BYTES[architecture], f"{shared_bytes} bytes of shared memory at width {dim}"
            print(f"attend sm_{architecture} {dtype} {len(compiled.asm['cubin'])} bytes, {shared_bytes} shared")
    others = (
        (combine, {"NUM_PARTS": 4, "HEADS": 8, "HAS_SINKS": True, "VALUE_DIM": 128, "VALUE_BLOCK": 128}),
        (rms_norm, {"SIZE": 4096, "BLOCK": 4096, "HAS_UPDATE": True, "NORMS_UPDATE": True, "ADDS_ONE": True}),
        (rotate_and_store, {"HEAD_DIM": 128, "HALF_BLOCK": 64, "HEADS": 4, "HAS_NORM": True, "ADDS_ONE": False}),
        (gate, {"SIZE": 14336, "BLOCK": 1024, "IS_GELU": True}),
    )
    for kernel, constants in others:
        compiled = compile_kernel(kernel, architecture, "bf16", **constants)
        print(f"{kernel.__name__} sm_{architecture} {len(compiled.asm['cubin'])} bytes")


if __name__ == "__main__":
    main()
