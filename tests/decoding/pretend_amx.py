"""AMX's tile instructions in plain C, for testing code compiled for AMX on a processor without it.

`python -m pytest -p pretend_amx FILES` runs tests this way, with this folder on PYTHONPATH. Set a separate
NUMBA_CACHE_DIR, since no other process can use the compiled code.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import llvmlite.binding

from laserbatch.pipeline.decoding.attention import amx
from laserbatch.pipeline.decoding.attention.tile_product import Emitter

# As Intel's manual describes each instruction; "TDPBF16PS" in the order of its sums.
TILES = r"""
#include <stdint.h>
#include <math.h>
#include <string.h>
static __thread uint8_t tiles[8][16][64];
static __thread int is_configured;
static float widened(uint16_t bits) { uint32_t word = (uint32_t)bits << 16; float value; memcpy(&value, &word, 4);
                                      return value; }
static void require(int condition) { if (!condition) __builtin_trap(); }
void pretend_ldtilecfg(const uint8_t *at) {
    require(at[0] == 1 && at[1] == 0);
    for (int tile = 0; tile < 8; tile++)
        require(at[16 + 2 * tile] == 64 && at[17 + 2 * tile] == 0 && at[48 + tile] == 16);
    is_configured = 1; memset(tiles, 0, sizeof tiles); }
void pretend_tilerelease(void) { is_configured = 0; memset(tiles, 255, sizeof tiles); }
void pretend_tilezero(uint8_t tile) { require(is_configured); memset(tiles[tile], 0, sizeof tiles[tile]); }
void pretend_tileloadd64(uint8_t tile, const uint8_t *from, int64_t stride) {
    require(is_configured); for (int row = 0; row < 16; row++) memcpy(tiles[tile][row], from + row * stride, 64); }
void pretend_tileloaddt164(uint8_t tile, const uint8_t *from, int64_t stride) {
    pretend_tileloadd64(tile, from, stride); }
void pretend_tilestored64(uint8_t tile, uint8_t *to, int64_t stride) {
    require(is_configured); for (int row = 0; row < 16; row++) memcpy(to + row * stride, tiles[tile][row], 64); }
void pretend_tdpbf16ps(uint8_t sums, uint8_t left, uint8_t right) {
    require(is_configured && sums != left && sums != right && left != right);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float parts[2] = {0, 0}, sum;
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 2; i++)
                    parts[i] = fmaf(widened(((uint16_t *)tiles[left][m])[2 * k + i]),
                                    widened(((uint16_t *)tiles[right][k])[2 * n + i]), parts[i]);
            memcpy(&sum, &tiles[sums][m][4 * n], 4);
            sum += parts[0] + parts[1];
            memcpy(&tiles[sums][m][4 * n], &sum, 4);
        }
}
"""
OF_TILES = ("tile", "ldtile", "tdp")
INTEL = "llvm.x86."

with tempfile.TemporaryDirectory() as folder:
    source = Path(folder, "tiles.c")
    source.write_text(TILES)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", f"{folder}/tiles.so", "-lm"], check=True)
    ctypes.CDLL(f"{folder}/tiles.so")
    llvmlite.binding.load_library_permanently(f"{folder}/tiles.so")

call_of_llvm = Emitter.call


def call_pretended(emit: Emitter, name: str, *arguments, **options):
    """`Emitter.call`, with the functions above in place of tile instructions."""
    instruction = name.removeprefix(INTEL)
    is_of_tiles = instruction.startswith(OF_TILES)
    return call_of_llvm(emit, f"pretend_{instruction}" if is_of_tiles else name, *arguments, **options)


Emitter.call = call_pretended
amx.has_amx = lambda: True
