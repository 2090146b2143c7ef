/* Takes steps of one token of a library with a KV cache (`cached`): reads rows of inputs from standard input, and writes
 * those of outputs, then the bytes of the saved states as text. */
#include <stdio.h>
#include <stdlib.h>

#include "cached.h"

enum { WIDTH = 32, MOST_TOKENS = 512 };

int main(void) {
  static float x[WIDTH], y[WIDTH], mask[MOST_TOKENS];
  const cached_options options = {.abi = CACHED_ABI, .threads = 1};
  cached_context *context;
  if (cached_create(&options, &context) || cached_set_dimension(context, CACHED_DIMENSION_SEQ, 1)) return 1;
  for (size_t length = 0; length < MOST_TOKENS && fread(x, sizeof x, 1, stdin); ++length) {
    mask[length] = 1;
    const cached_buffer in[] = {{x, sizeof x}, {mask, (length + 1) * sizeof *mask}}, out[] = {{y, sizeof y}};
    if (cached_step(context, in, CACHED_STEP_INPUTS, out, CACHED_STEP_OUTPUTS)) return 2;
    fwrite(y, sizeof y, 1, stdout);
  }
  size_t bytes;
  if (cached_state_bytes(context, &bytes)) return 3;
  printf("%zu", bytes);
  cached_destroy(context);
  return 0;
}
