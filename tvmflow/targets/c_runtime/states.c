/* States: tensors that a step leaves for the next one. A step appends to some in place (see append.c); others have two
 * buffers, one to read and one to write, which each step swaps. So no step copies them, and one that fails changes
 * nothing. */

#include <math.h>

typedef struct {
  size_t input;
  size_t output;
  size_t outer; /* so many blocks, each of `length` rows if it grows */
  size_t row;   /* the bytes of a row, or of the block of a state that is replaced */
  int axis;     /* along which it grows; -1 for one that each step replaces */
  const unsigned char *initial; /* its content at the beginning; NULL for zeros */
} tf_state;

static const tf_state tf_states[] = {TF_STATE_TABLE};

/* The head of a saved state. */
typedef struct {
  char magic[8];
  uint64_t model[2];
  int64_t length;
  int64_t dropped;
  uint64_t random;
  uint64_t bytes; /* of all that follows */
  uint64_t checksum;
} tf_saved;

static const tf_saved tf_saved_head = {{'T', 'V', 'M', 'F', 'S', 'T', '0', '2'}, {TF_STATE_MODEL}, 0, 0, 0, 0, 0};

static size_t tf_state_bytes(const tf_state *state, int64_t length) {
  return state->outer * state->row * (state->axis < 0 ? 1 : (size_t)length);
}

static bool tf_grows_in_place(size_t state) { return TF_APPENDS_TO(tf_states[state].input); }

/* The memory of a state, in the layout in which a step takes it. */
static unsigned char *tf_held_data(const tf_context *context, size_t state) {
  return context->held[state][tf_grows_in_place(state) ? 0 : context->held_now].data;
}

/* Copy a state in the layout of the model. */
static void tf_copy_state(const tf_context *context, size_t state, unsigned char *content) {
  const unsigned char *data = tf_held_data(context, state);
  const size_t bytes = tf_state_bytes(&tf_states[state], context->length);
#ifdef TF_APPENDED_STATES
  const size_t rows = (size_t)context->length;
  if (tf_grows_in_place(state)) {
    tf_move_out(content, data, tf_states[state].outer, rows, tf_states[state].row);
    return;
  }
#endif
  if (bytes) memcpy(content, data, bytes);
}

static size_t tf_grow(const tf_held *held, size_t bytes) {
  return tf_padded(bytes > held->capacity / 2 * 3 ? bytes : held->capacity / 2 * 3);
}

/* Reserve memory for a state, without its content. It grows by half at least, so that few steps allocate. */
static int tf_hold(tf_context *context, tf_held *held, size_t bytes) {
  if (bytes <= held->capacity) return TF_STATUS(OK);
  if (bytes > SIZE_MAX / 4) return TF_STATUS(NO_MEMORY);
  const tf_options *options = &context->options;
  const size_t capacity = tf_grow(held, bytes);
  void *memory;
  const int status = tf_allocate(options, capacity, TF_CACHE_LINE, &memory);
  if (status != TF_STATUS(OK)) return status;
  if (held->data) options->release(options->user, held->data);
  held->data = memory;
  held->capacity = capacity;
  return TF_STATUS(OK);
}

/* Memory in which states grow. Forks share it: one of them goes on in it, and others copy their rows before they do. */
typedef struct {
  atomic_size_t contexts;
  atomic_size_t rows; /* those that a context has, or takes */
} tf_shared;

static tf_shared *tf_share_of(const tf_held *held) { return (tf_shared *)(void *)(held->data - TF_CACHE_LINE); }

static void tf_leave(const tf_options *options, tf_held *held) {
  if (held->data && atomic_fetch_sub(&tf_share_of(held)->contexts, 1) == 1)
    options->release(options->user, held->data - TF_CACHE_LINE);
  *held = (tf_held){NULL, 0};
}

static int tf_new_shared(const tf_options *options, size_t capacity, size_t rows, tf_held *held) {
  void *memory;
  if (capacity > SIZE_MAX / 4) return TF_STATUS(NO_MEMORY);
  const int status = tf_allocate(options, TF_CACHE_LINE + capacity, TF_CACHE_LINE, &memory);
  if (status != TF_STATUS(OK)) return status;
  *held = (tf_held){(unsigned char *)memory + TF_CACHE_LINE, capacity};
  atomic_init(&tf_share_of(held)->contexts, 1);
  atomic_init(&tf_share_of(held)->rows, rows);
  return TF_STATUS(OK);
}

/* Copy the rows of a state to memory that no other context has; it has or takes `rows` of them. */
static int tf_copy_rows(tf_context *context, size_t state, size_t capacity, int64_t rows) {
  tf_held *held = &context->held[state][0], larger;
  const int status = tf_new_shared(&context->options, capacity, (size_t)rows, &larger);
  if (status != TF_STATUS(OK)) return status;
  if (context->length) memcpy(larger.data, held->data, tf_state_bytes(&tf_states[state], context->length));
  tf_leave(&context->options, held);
  *held = larger;
  return TF_STATUS(OK);
}

/* Have memory for the rows that a step appends, which no other context writes. */
static int tf_claim_rows(tf_context *context, size_t state, int64_t length) {
  tf_held *held = &context->held[state][0];
  const size_t bytes = tf_state_bytes(&tf_states[state], length);
  if (held->data && bytes <= held->capacity) {
    tf_shared *shared = tf_share_of(held);
    size_t rows = (size_t)context->length;
    if (atomic_load(&shared->contexts) == 1) {
      atomic_store(&shared->rows, (size_t)length);
      return TF_STATUS(OK);
    }
    if (atomic_compare_exchange_strong(&shared->rows, &rows, (size_t)length)) return TF_STATUS(OK);
  }
  if (bytes > SIZE_MAX / 4) return TF_STATUS(NO_MEMORY);
  return tf_copy_rows(context, state, tf_grow(held, bytes), length);
}

static void tf_release_states(tf_context *context) {
  const tf_options *options = &context->options;
  for (size_t i = 0; i < TF_STATES; ++i) {
    if (tf_grows_in_place(i)) tf_leave(options, &context->held[i][0]);
    for (size_t j = 0; j < 2; ++j)
      if (context->held[i][j].data) options->release(options->user, context->held[i][j].data);
  }
}

static int tf_reset(tf_context *context) {
  for (size_t i = 0; i < TF_STATES; ++i) {
    if (tf_grows_in_place(i)) continue;
    const size_t bytes = tf_state_bytes(&tf_states[i], 0);
    tf_held *held = &context->held[i][context->held_now];
    const int status = tf_hold(context, held, bytes);
    if (status != TF_STATUS(OK)) return status;
    if (tf_states[i].initial)
      memcpy(held->data, tf_states[i].initial, bytes);
    else if (bytes)
      memset(held->data, 0, bytes);
  }
  context->length = context->dropped = 0;
  context->random = 0;
  return TF_STATUS(OK);
}

/* Set the dimensions to the sizes of the states, and find their length after the step. */
static int tf_measure_states(tf_context *context, int64_t *length) {
  *length = context->length;
#ifdef TF_STATE_DIMENSION
  tf_set(context, TF_STATE_DIMENSION, context->length);
#endif
#ifdef TF_DIMENSIONS
  const int status = tf_update(context);
  if (status != TF_STATUS(OK)) return status;
#endif
#ifdef TF_STATE_DIMENSION
  int64_t shape[TF_MAX_RANK];
  tf_output_shape(context->values, tf_states[TF_GROWING_STATE].output, shape);
  *length = shape[tf_states[TF_GROWING_STATE].axis];
  if (*length > tf_dimensions[TF_STATE_DIMENSION].max) return TF_STATUS(WRONG_LENGTH);
#endif
  return TF_STATUS(OK);
}

static int tf_take_step(tf_context *context, const tf_buffer *inputs, const tf_buffer *outputs) {
  tf_buffer in[TF_STATUS(INPUTS)], out[TF_STATUS(OUTPUTS)];
  const unsigned now = context->held_now, then = 1 - now;
  int64_t length;
  int status = tf_measure_states(context, &length);
  for (size_t i = 0; i < TF_STATES && status == TF_STATUS(OK); ++i) {
    const tf_state *state = &tf_states[i];
    const size_t bytes = tf_state_bytes(state, length);
    const bool is_in_place = tf_grows_in_place(i);
    status = is_in_place ? tf_claim_rows(context, i, length) : tf_hold(context, &context->held[i][then], bytes);
    tf_held *before = &context->held[i][is_in_place ? 0 : now], *after = is_in_place ? before : &context->held[i][then];
    in[state->input] = (tf_buffer){before->data, tf_state_bytes(state, context->length)};
    out[state->output] = (tf_buffer){after->data, bytes};
  }
  if (status != TF_STATUS(OK)) return status;
  static const size_t step_inputs[] = {TF_STEP_INPUTS 0}, step_outputs[] = {TF_STEP_OUTPUTS 0};
  for (size_t i = 0; i + TF_STATES < TF_STATUS(INPUTS); ++i) in[step_inputs[i]] = inputs[i];
  for (size_t i = 0; i + TF_STATES < TF_STATUS(OUTPUTS); ++i) out[step_outputs[i]] = outputs[i];
  context->is_step = true;
  status = tf_call(context, in, TF_STATUS(INPUTS), out, TF_STATUS(OUTPUTS));
  context->is_step = false;
  if (status != TF_STATUS(OK)) return status;
  context->held_now = then;
  context->length = length;
  return TF_STATUS(OK);
}

int TF(step)(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
             size_t output_count) {
  if (!context || (!inputs && input_count) || (!outputs && output_count)) return TF_STATUS(NULL_ARGUMENT);
  if (input_count + TF_STATES != TF_STATUS(INPUTS) || output_count + TF_STATES != TF_STATUS(OUTPUTS))
    return TF_STATUS(WRONG_COUNT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  const int status = tf_take_step(context, inputs, outputs);
  tf_end_call(context);
  return status;
}

int TF(reset)(tf_context *context) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  const int status = tf_reset(context);
  tf_end_call(context);
  return status;
}

int64_t TF(length)(const tf_context *context) { return context ? context->length : -1; }

int64_t TF(dropped)(const tf_context *context) { return context ? context->dropped : -1; }

/* Return whether the growing states can have a length up to theirs. */
static int tf_check_shorter(const tf_context *context, int64_t length) {
#ifdef TF_STATE_DIMENSION
  int status = length < 0 || length > context->length ? TF_STATUS(WRONG_LENGTH) : TF_STATUS(OK);
#else
  int status = TF_STATUS(NOT_TRUNCATED); /* a length of 0 would leave the states as they are */
#endif
  for (size_t i = 0; i < TF_STATES; ++i)
    if (tf_states[i].axis < 0 && length != context->length) status = TF_STATUS(NOT_TRUNCATED);
  return status;
}

/* Let the growing states have only some of their rows. Rows that grow in place are one block, which begins with them. */
static void tf_keep_rows(tf_context *context, int64_t first, int64_t length) {
  for (size_t i = 0; i < TF_STATES && length < context->length; ++i) {
    const size_t blocks = tf_grows_in_place(i) ? 1 : tf_states[i].outer, row = tf_state_bytes(&tf_states[i], 1) / blocks;
    const size_t from = (size_t)context->length * row, to = (size_t)length * row;
    unsigned char *data = tf_held_data(context, i);
    for (size_t block = first ? 0 : 1; block < blocks && to; ++block)
      memmove(data + block * to, data + block * from + (size_t)first * row, to);
  }
  context->length = length;
}

int TF(truncate)(tf_context *context, int64_t length) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  const int status = tf_check_shorter(context, length);
  if (status == TF_STATUS(OK)) tf_keep_rows(context, 0, length);
  tf_end_call(context);
  return status;
}

int TF(drop)(tf_context *context, int64_t count) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  const int64_t length = count < 0 ? -1 : context->length - count;
  int status = tf_check_shorter(context, length);
  for (size_t i = 0; i < TF_STATES && status == TF_STATUS(OK) && count; ++i) {
    tf_held *held = &context->held[i][0];
    if (!tf_grows_in_place(i)) continue;
    if (atomic_load(&tf_share_of(held)->contexts) > 1) status = tf_copy_rows(context, i, held->capacity, context->length);
    if (status == TF_STATUS(OK)) atomic_store(&tf_share_of(held)->rows, (size_t)length);
  }
  if (status == TF_STATUS(OK)) {
    tf_keep_rows(context, count, length);
    context->dropped += count;
  }
  tf_end_call(context);
  return status;
}

int TF(state)(tf_context *context, size_t state, const void **data, size_t *bytes) {
  if (!context || !data || !bytes) return TF_STATUS(NULL_ARGUMENT);
  if (state >= TF_STATES) return TF_STATUS(WRONG_COUNT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  int status = TF_STATUS(OK);
  *data = tf_held_data(context, state);
  *bytes = tf_state_bytes(&tf_states[state], context->length);
  if (tf_grows_in_place(state)) {
    tf_held *copy = &context->held[state][1];
    status = tf_hold(context, copy, *bytes);
    if (status == TF_STATUS(OK)) tf_copy_state(context, state, copy->data);
    *data = copy->data;
  }
  tf_end_call(context);
  return status;
}

/* ------------------------------------------------------------------ saved states */

static size_t tf_all_state_bytes(int64_t length) {
  size_t bytes = 0;
  for (size_t i = 0; i < TF_STATES; ++i) bytes += tf_state_bytes(&tf_states[i], length);
  return bytes;
}

/* FNV-1a over words of eight bytes, the rest byte by byte, and the head before the checksum. */
static uint64_t tf_checksum(const tf_saved *head, const unsigned char *data, size_t bytes) {
  const uint64_t prime = 0x100000001b3u;
  uint64_t sum = 0xcbf29ce484222325u, word;
  const uint64_t known[] = {(uint64_t)head->length, (uint64_t)head->dropped, head->random};
  size_t i = 0;
  for (; i < sizeof known / sizeof *known; ++i) sum = (sum ^ known[i]) * prime;
  for (i = 0; i + sizeof word <= bytes; i += sizeof word) {
    memcpy(&word, data + i, sizeof word);
    sum = (sum ^ word) * prime;
    sum ^= sum >> 29;
  }
  for (; i < bytes; ++i) sum = (sum ^ data[i]) * prime;
  return sum;
}

int TF(state_bytes)(tf_context *context, size_t *bytes) {
  if (!context || !bytes) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  *bytes = sizeof(tf_saved) + tf_all_state_bytes(context->length);
  tf_end_call(context);
  return TF_STATUS(OK);
}

int TF(save_state)(tf_context *context, void *data, size_t bytes) {
  if (!context || !data) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  tf_saved head = tf_saved_head;
  head.length = context->length;
  head.dropped = context->dropped;
  head.random = context->random;
  head.bytes = tf_all_state_bytes(context->length);
  const int status = bytes == sizeof head + head.bytes ? TF_STATUS(OK) : TF_STATUS(WRONG_COUNT);
  if (status == TF_STATUS(OK)) {
    unsigned char *content = (unsigned char *)data + sizeof head, *place = content;
    for (size_t i = 0; i < TF_STATES; ++i) {
      tf_copy_state(context, i, place);
      place += tf_state_bytes(&tf_states[i], context->length);
    }
    head.checksum = tf_checksum(&head, content, (size_t)head.bytes);
    memcpy(data, &head, sizeof head);
  }
  tf_end_call(context);
  return status;
}

/* Return whether bytes from an untrusted source are a state of this model. */
static bool tf_is_saved(const tf_saved *head, const unsigned char *content, size_t bytes) {
  if (memcmp(head->magic, tf_saved_head.magic, sizeof head->magic)) return false;
  if (memcmp(head->model, tf_saved_head.model, sizeof head->model)) return false;
#ifdef TF_STATE_DIMENSION
  if (head->length < 0 || head->length > tf_dimensions[TF_STATE_DIMENSION].max) return false;
#else
  if (head->length) return false;
#endif
  if (head->dropped < 0 || head->dropped > INT64_MAX / 2) return false;
  return head->bytes == bytes && bytes == tf_all_state_bytes(head->length) &&
         head->checksum == tf_checksum(head, content, bytes);
}

/* Loading writes other memory, so that an error changes nothing. */
static int tf_set_states(tf_context *context, int64_t length, const unsigned char *content) {
  const unsigned then = 1 - context->held_now;
  tf_held loaded[TF_STATES] = {{NULL, 0}};
  int status = TF_STATUS(OK);
  for (size_t i = 0; i < TF_STATES && status == TF_STATUS(OK); ++i) {
    const size_t size = tf_state_bytes(&tf_states[i], length);
    if (tf_grows_in_place(i)) {
      status = tf_new_shared(&context->options, size, (size_t)length, &loaded[i]);
#ifdef TF_APPENDED_STATES
      const tf_state *state = &tf_states[i];
      if (status == TF_STATUS(OK)) tf_move_in(loaded[i].data, content, state->outer, (size_t)length, state->row);
#endif
    } else {
      tf_held *held = &context->held[i][then];
      status = tf_hold(context, held, size);
      if (status == TF_STATUS(OK) && size) memcpy(held->data, content, size);
    }
    content += size;
  }
  for (size_t i = 0; i < TF_STATES; ++i) {
    if (!tf_grows_in_place(i)) continue;
    tf_leave(&context->options, status == TF_STATUS(OK) ? &context->held[i][0] : &loaded[i]);
    if (status == TF_STATUS(OK)) context->held[i][0] = loaded[i];
  }
  if (status != TF_STATUS(OK)) return status;
  context->held_now = then;
  context->length = length;
  return TF_STATUS(OK);
}

int TF(load_state)(tf_context *context, const void *data, size_t bytes) {
  tf_saved head;
  if (!context || !data) return TF_STATUS(NULL_ARGUMENT);
  if (bytes < sizeof head) return TF_STATUS(WRONG_STATE);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  memcpy(&head, data, sizeof head);
  const unsigned char *content = (const unsigned char *)data + sizeof head;
  int status = TF_STATUS(WRONG_STATE);
  if (tf_is_saved(&head, content, bytes - sizeof head)) status = tf_set_states(context, head.length, content);
  if (status == TF_STATUS(OK)) {
    context->dropped = head.dropped;
    context->random = head.random;
  }
  tf_end_call(context);
  return status;
}

int TF(fork)(tf_context *context, tf_context **copy) {
  if (!copy) return TF_STATUS(NULL_ARGUMENT);
  *copy = NULL;
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  int status = TF(create)(&context->options, copy);
  for (size_t i = 0; i < TF_STATES && status == TF_STATUS(OK); ++i) {
    const size_t bytes = tf_state_bytes(&tf_states[i], context->length);
    tf_held *held = &(*copy)->held[i][(*copy)->held_now];
    if (tf_grows_in_place(i)) {
      const tf_held *shared = &context->held[i][0];
      if (shared->data) atomic_fetch_add(&tf_share_of(shared)->contexts, 1);
      (*copy)->held[i][0] = *shared;
      continue;
    }
    status = tf_hold(*copy, held, bytes);
    if (status == TF_STATUS(OK) && bytes) memcpy(held->data, tf_held_data(context, i), bytes);
  }
  if (status == TF_STATUS(OK)) {
    (*copy)->length = context->length;
    (*copy)->dropped = context->dropped;
    (*copy)->random = context->random;
#ifdef TF_DIMENSIONS
    for (size_t i = 0; i < TF_DIMENSIONS; ++i) tf_set(*copy, i, context->values[i]);
#endif
  } else if (*copy) {
    TF(destroy)(*copy);
    *copy = NULL;
  }
  tf_end_call(context);
  return status;
}

/* ------------------------------------------------------------------ tokens */

#define TF_MAX_CANDIDATES 1024

typedef struct {
  float logit;
  int64_t token;
} tf_candidate;

/* Return a number from 0 to below 1: splitmix64 (Steele, Lea and Flood, 2014). */
static double tf_draw(tf_context *context) {
  uint64_t x = context->random += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

/* Of equal logits, the first token comes first. */
static bool tf_is_less(tf_candidate a, tf_candidate b) {
  return a.logit < b.logit || (a.logit == b.logit && a.token > b.token);
}

/* Restore a heap, whose root is the least, after its root has changed. */
static void tf_sift(tf_candidate *heap, size_t count) {
  for (size_t i = 0;;) {
    size_t least = i;
    for (size_t child = 2 * i + 1; child <= 2 * i + 2 && child < count; ++child)
      if (tf_is_less(heap[child], heap[least])) least = child;
    if (least == i) return;
    const tf_candidate moved = heap[i];
    heap[i] = heap[least];
    heap[least] = moved;
    i = least;
  }
}

/* Find the largest logits, the largest one first. */
static size_t tf_find_largest(const float *logits, size_t count, size_t most, tf_candidate *found) {
  size_t held = 0;
  for (size_t i = 0; i < count; ++i) {
    const tf_candidate candidate = {logits[i], (int64_t)i};
    if (held < most) {
      size_t place = held++;
      for (; place && tf_is_less(candidate, found[(place - 1) / 2]); place = (place - 1) / 2) found[place] = found[(place - 1) / 2];
      found[place] = candidate;
    } else if (tf_is_less(found[0], candidate)) {
      found[0] = candidate;
      tf_sift(found, held);
    }
  }
  for (size_t left = held; left > 1; --left) {
    const tf_candidate least = found[0];
    found[0] = found[left - 1];
    tf_sift(found, left - 1);
    found[left - 1] = least;
  }
  return held;
}

/* The probability of a token, up to a common factor. */
static double tf_weigh(float logit, float largest, float scale) { return exp((double)(logit - largest) * scale); }

static double tf_sum_weights(const float *logits, size_t count, float largest, float scale) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += tf_weigh(logits[i], largest, scale);
  return sum;
}

/* Choose among candidates; top_p is a share of `all`, the sum of the weights. */
static int64_t tf_choose_candidate(tf_context *context, const tf_candidate *found, size_t held, float scale, double all,
                                   double top_p) {
  double kept = 0, sum = 0;
  size_t last = 0;
  for (; last < held && (last == 0 || kept < top_p * all); ++last) 
    kept += tf_weigh(found[last].logit, found[0].logit, scale);
  const double drawn = tf_draw(context) * kept;
  for (size_t i = 0; i < last; ++i) {
    sum += tf_weigh(found[i].logit, found[0].logit, scale);
    if (drawn < sum) return found[i].token;
  }
  return found[last - 1].token;
}

static int64_t tf_sample(tf_context *context, const float *logits, size_t count, const TF(sampling) *sampling) {
  tf_candidate found[TF_MAX_CANDIDATES];
  tf_find_largest(logits, count, 1, found);
  if (!(sampling->temperature > 0)) return found[0].token;
  const float scale = 1 / sampling->temperature, largest = found[0].logit;
  const bool has_p = sampling->top_p > 0 && sampling->top_p < 1;
  double all = 0, sum = 0;
  if (!sampling->top_k && !has_p) {
    const double drawn = tf_draw(context) * tf_sum_weights(logits, count, largest, scale);
    for (size_t i = 0; i < count; ++i) {
      sum += tf_weigh(logits[i], largest, scale);
      if (drawn < sum) return (int64_t)i;
    }
    return found[0].token;
  }
  const size_t most = sampling->top_k && sampling->top_k < TF_MAX_CANDIDATES ? sampling->top_k : TF_MAX_CANDIDATES;
  const size_t held = tf_find_largest(logits, count, most, found);
  if (sampling->top_k)
    for (size_t i = 0; i < held; ++i) all += tf_weigh(found[i].logit, largest, scale);
  else
    all = tf_sum_weights(logits, count, largest, scale);
  return tf_choose_candidate(context, found, held, scale, all, has_p ? sampling->top_p : 1);
}

int TF(sample)(tf_context *context, float *logits, size_t count, const TF(sampling) *sampling, const int64_t *recent,
               size_t recent_count, int64_t *token) {
  if (!context || !logits || !sampling || !token || (!recent && recent_count)) return TF_STATUS(NULL_ARGUMENT);
  if (!count) return TF_STATUS(WRONG_COUNT);
  const float penalty = sampling->repetition_penalty;
  if (!(sampling->temperature >= 0 && sampling->top_p >= 0 && sampling->top_p <= 1 && penalty >= 0) ||
      sampling->top_k > TF_MAX_CANDIDATES)
    return TF_STATUS(WRONG_SAMPLING);
  for (size_t i = 0; i < recent_count; ++i)
    if (recent[i] < 0 || (uint64_t)recent[i] >= count) return TF_STATUS(WRONG_SAMPLING);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  for (size_t i = 0; i < recent_count && penalty > 0 && penalty != 1; ++i) {
    bool is_first = true;
    for (size_t j = 0; j < i && is_first; ++j) is_first = recent[j] != recent[i];
    float *logit = &logits[recent[i]];
    if (is_first) *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
  }
  *token = tf_sample(context, logits, count, sampling);
  tf_end_call(context);
  return TF_STATUS(OK);
}

int TF(seed)(tf_context *context, uint64_t seed) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
  context->random = seed;
  tf_end_call(context);
  return TF_STATUS(OK);
}
