/* Random sequences of calls of a library with a KV cache; each context is compared with a copy of its states. The arguments
 * are the first seed and the number of sequences. States have rows of DEPTH floats, or ROW of the type ELEMENT. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cached.h"

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "seed %llu: line %d: not %s\n", (unsigned long long)seed, __LINE__, #condition); \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

enum { CONTEXTS = 4, CALLS = 24, HEADS = 2, DEPTH = 16, WIDTH = 32, MOST_ROWS = 40, MOST_TOKENS = 12 };

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef ROW
#define ROW DEPTH
#endif
typedef ELEMENT Cache[MOST_ROWS][HEADS][ROW];

typedef struct {
  cached_context *context; /* NULL for none */
  int64_t length, dropped;
  Cache states[CACHED_STATES];
} Stream;

static Stream streams[CONTEXTS];
static uint64_t seed, state;

static uint32_t draw(uint32_t count) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33) % count;
}

/* Compare the states with the copy, to which rows beyond `known` are added. */
static void check(Stream *stream, int64_t known) {
  const int64_t length = stream->length;
  CHECK(cached_length(stream->context) == length && cached_dropped(stream->context) == stream->dropped);
  for (size_t i = 0; i < CACHED_STATES; ++i) {
    const void *data;
    size_t bytes;
    CHECK(cached_state(stream->context, i, &data, &bytes) == CACHED_OK);
    CHECK(bytes == (size_t)length * HEADS * ROW * sizeof(ELEMENT));
    for (int64_t row = 0; row < length; ++row)
      for (size_t head = 0; head < HEADS; ++head) {
        const ELEMENT *values = (const ELEMENT *)data + ((size_t)length * head + (size_t)row) * ROW;
        ELEMENT *copy = stream->states[i][row][head];
        if (row < known)
          CHECK(!memcmp(copy, values, ROW * sizeof(ELEMENT)));
        else
          memcpy(copy, values, ROW * sizeof(ELEMENT));
      }
  }
}

static void step(Stream *stream) {
  const int64_t tokens = 1 + draw(MOST_TOKENS), known = stream->length;
  const size_t wrong = draw(8) ? 0 : sizeof(float);
  const size_t bytes = (size_t)tokens * WIDTH * sizeof(float), mask_bytes = (size_t)(known + tokens) * sizeof(float) + wrong;
  float *x = malloc(bytes), *y = malloc(bytes), *mask = malloc(mask_bytes);
  for (size_t i = 0; i < bytes / sizeof *x; ++i) x[i] = (float)draw(64) / 32 - 1;
  for (size_t i = 0; i < mask_bytes / sizeof *mask; ++i) mask[i] = (float)(draw(4) > 0);
  const cached_buffer in[] = {{x, bytes}, {mask, mask_bytes}}, out[] = {{y, bytes}};
  CHECK(cached_set_dimension(stream->context, CACHED_DIMENSION_SEQ, tokens) == CACHED_OK);
  const int status = cached_step(stream->context, in, CACHED_STEP_INPUTS, out, CACHED_STEP_OUTPUTS);
  if (known + tokens > MOST_ROWS)
    CHECK(status == CACHED_WRONG_LENGTH);
  else if (wrong)
    CHECK(status >= CACHED_WRONG_SIZE);
  else
    CHECK(status == CACHED_OK);
  if (status == CACHED_OK) stream->length += tokens;
  check(stream, known);
  free(x), free(y), free(mask);
}

static void save_and_load(Stream *from, Stream *to) {
  size_t bytes;
  CHECK(cached_state_bytes(from->context, &bytes) == CACHED_OK);
  unsigned char *saved = malloc(bytes);
  CHECK(cached_save_state(from->context, saved, bytes) == CACHED_OK);
  const uint32_t damage = draw(4);
  if (damage == 1) saved[draw((uint32_t)bytes)] ^= (unsigned char)(1 + draw(255));
  if (damage == 2) {
    const size_t left = draw((uint32_t)bytes);
    unsigned char *part = malloc(left ? left : 1);
    memcpy(part, saved, left);
    CHECK(cached_load_state(to->context, part, left) == CACHED_WRONG_STATE);
    free(part);
  } else {
    const int status = cached_load_state(to->context, saved, bytes);
    CHECK(status == (damage == 1 ? CACHED_WRONG_STATE : CACHED_OK));
    if (status == CACHED_OK && from != to) {
      to->length = from->length;
      to->dropped = from->dropped;
      memcpy(to->states, from->states, sizeof to->states);
    }
  }
  check(to, to->length);
  free(saved);
}

static void call(Stream *stream, Stream *other) {
  switch (draw(9)) {
    case 0:
      CHECK(cached_reset(stream->context) == CACHED_OK);
      stream->length = stream->dropped = 0;
      break;
    case 1: {
      const int64_t length = (int64_t)draw((uint32_t)stream->length + 3) - 1;
      const int status = cached_truncate(stream->context, length);
      CHECK(status == (length < 0 || length > stream->length ? CACHED_WRONG_LENGTH : CACHED_OK));
      if (status == CACHED_OK) stream->length = length;
      break;
    }
    case 2:
      if (stream == other) break;
      cached_destroy(other->context);
      memcpy(other, stream, sizeof *other);
      CHECK(cached_fork(stream->context, &other->context) == CACHED_OK);
      check(other, other->length);
      break;
    case 3:
      save_and_load(stream, other);
      break;
    case 4: {
      const int64_t count = (int64_t)draw((uint32_t)stream->length + 3) - 1;
      const int status = cached_drop(stream->context, count);
      CHECK(status == (count < 0 || count > stream->length ? CACHED_WRONG_LENGTH : CACHED_OK));
      if (status != CACHED_OK) break;
      stream->length -= count;
      stream->dropped += count;
      for (size_t i = 0; i < CACHED_STATES; ++i)
        memmove(stream->states[i], stream->states[i][count], (size_t)stream->length * sizeof *stream->states[i]);
      break;
    }
    case 5:
      if (draw(4)) break;
      cached_destroy(stream->context);
      stream->context = NULL;
      return;
    default:
      step(stream);
  }
  check(stream, stream->length);
}

static void create(Stream *stream) {
  const cached_options options = {.abi = CACHED_ABI, .threads = 1};
  CHECK(cached_create(&options, &stream->context) == CACHED_OK);
  stream->length = stream->dropped = 0;
}

int main(int count, char **words) {
  if (count != 3) return 2;
  const uint64_t first = strtoull(words[1], NULL, 10), sequences = strtoull(words[2], NULL, 10);
  for (seed = first; seed < first + sequences; ++seed) {
    state = seed;
    for (size_t i = 0; i < CALLS; ++i) {
      Stream *stream = &streams[draw(CONTEXTS)], *other = &streams[draw(CONTEXTS)];
      if (!stream->context) create(stream);
      if (!other->context) create(other);
      call(stream, other);
    }
    for (size_t i = 0; i < CONTEXTS; ++i) {
      cached_destroy(streams[i].context);
      streams[i].context = NULL;
    }
  }
  return 0;
}
