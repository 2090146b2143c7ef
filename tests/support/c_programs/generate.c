/* Prints the most likely tokens that follow those of the arguments, after their number. */
#include <stdio.h>
#include <stdlib.h>

#include "manual.h"

enum { LIMIT = 512, VOCABULARY = 512 };

static float mask[LIMIT], logits[64 * VOCABULARY];

static int step(manual_context *context, int64_t *tokens, int64_t count) {
  int64_t positions[64];
  const int64_t length = manual_length(context);
  for (int64_t i = 0; i < count; ++i) positions[i] = length + i;
  const size_t bytes = (size_t)count * 8;
  const manual_buffer in[] = {{tokens, bytes}, {mask, (size_t)(length + count) * 4}, {positions, bytes}};
  const manual_buffer out[] = {{logits, (size_t)count * VOCABULARY * 4}};
  const int status = manual_set_dimension(context, MANUAL_DIMENSION_SEQ, count);
  return status ? status : manual_step(context, in, MANUAL_STEP_INPUTS, out, MANUAL_STEP_OUTPUTS);
}

int main(int count, char **words) {
  const manual_options options = {.abi = MANUAL_ABI, .threads = 1};
  const manual_sampling greedy = {0};
  manual_context *context;
  int64_t tokens[64];
  int status = manual_create(&options, &context);
  for (int i = 2; i < count; ++i) tokens[i - 2] = atoll(words[i]);
  for (int i = 0; i < LIMIT; ++i) mask[i] = 1;
  count -= 2;
  for (int left = atoi(words[1]); left-- && !status; count = 1) {
    status = step(context, tokens, count);
    float *last = logits + (count - 1) * VOCABULARY;
    if (!status) status = manual_sample(context, last, VOCABULARY, &greedy, NULL, 0, tokens);
    printf("%lld\n", (long long)tokens[0]);
  }
  manual_destroy(context);
  return status;
}
