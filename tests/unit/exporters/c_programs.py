"""Programs that call C libraries."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import numpy as np

from tests.support import exports

EMPTY: Final = """
#define TF_PARALLEL_LAUNCH empty_launch
#define TF_ALLOC_WORKSPACE empty_allocate
#define TF_FREE_WORKSPACE empty_free
#define TF_ARENA 0u
#define TF_STAGING 128u
#define TF_SCRATCH 0u
#define TF_KERNELS 0u
#define TF_COUNTS 0u
#define TF_MOST_TASKS 1u
#define TF_INPUTS_BYTES0 0u
#define TF_INPUTS_BYTES1 8u
#define TF_OUTPUTS_BYTES0 0u
#define TF_OUTPUTS_BYTES1 8u

static const tf_output_count tf_output_counts[] = {{-1, 0}, {-1, 0}};
#define TF_WEIGHTS empty_weights
const unsigned char empty_weights[1];
static const char *const tf_kernel_names[TF_KERNELS + 1] = {NULL};

static int tf_steps(tf_context *tf, unsigned char *arena, const unsigned char *weights,
                    unsigned char *const *in, unsigned char *const *out) {
  TF_BEGIN(tf, arena, weights, in, out);
  memcpy(out[1], in[1], TF_OUTPUTS_BYTES1);
  return 0;
}
"""


PROGRAM: Final = """
#include <stdio.h>
#include "digits.h"

int main(int count, char **arguments) {
  static float data[64], scores[10];
  digits_context *context;
  digits_options options = {.abi = DIGITS_ABI, .threads = 2};
  if (digits_create(&options, &context) != DIGITS_OK) return 1;
  FILE *images = fopen(arguments[count - 1], "rb");
  while (fread(data, sizeof data, 1, images) == 1) {
    digits_buffer input = {data, sizeof data}, output = {scores, sizeof scores};
    const int status = digits_run(context, &input, DIGITS_INPUTS, &output, DIGITS_OUTPUTS);
    if (status != DIGITS_OK) return puts(digits_message(status)), 2;
    int best = 0;
    for (int label = 1; label < 10; ++label) if (scores[label] > scores[best]) best = label;
    printf("%d\\n", best);
  }
  fclose(images);
  return digits_destroy(context);
}
"""


WINE = shutil.which("wine64", path=os.pathsep.join((os.environ["PATH"], "/usr/lib/wine")))


def write_images(folder: Path) -> list[int]:
    """Write the held-out images to a file, and return their labels."""
    images, labels = exports.held_out()
    (folder / "images").write_bytes(images.astype("float32").tobytes())
    return list(map(int, labels))


def share_of_right(printed: str, labels: list[int]) -> float:
    """The share of printed labels that are right."""
    named = list(map(int, printed.split()))
    return float(np.mean(np.array(named) == labels))
