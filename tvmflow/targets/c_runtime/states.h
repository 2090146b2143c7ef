
/* What functions return for states. */
enum {
  %(NAME)s_WRONG_LENGTH = 24,  /* the states cannot have this length: a step grows them too far, or a call does not shorten them */
  %(NAME)s_WRONG_STATE = 25,  /* what should be a saved state is damaged, or that of another model or version */
  %(NAME)s_NOT_TRUNCATED = 26, /* a state that each step replaces has no rows to forget: reset it */
  %(NAME)s_WRONG_SAMPLING = 27 /* temperature, top_k, top_p or penalty is out of its range, or a token has no logit */
};
//----
/* States: tensors that a call leaves for the next one, in memory of the context. There are %(NAME)s_STATES:
 *
%(states)s
 */

/* Compute the next step: %(name)s_run without the inputs and outputs that are states. The others keep their order, and have
 * the places %(NAME)s_STEP_INPUT_… and %(NAME)s_STEP_OUTPUT_…. A step that fails changes no state. */
%(NAME)s_API int %(name)s_step(%(name)s_context *context, const %(name)s_buffer *inputs, size_t input_count,
    const %(name)s_buffer *outputs, size_t output_count);

/* Go back to the beginning, as in a new context: growing states are empty, the others 0, or what the
 * model begins with. */
%(NAME)s_API int %(name)s_reset(%(name)s_context *context);

/* The length of the growing states: that of all steps since the beginning, but for what was truncated or dropped. */
%(NAME)s_API int64_t %(name)s_length(const %(name)s_context *context);

/* The rows that %(name)s_drop has taken from the growing states since the beginning: the next position of a token is this
 * plus the length. */
%(NAME)s_API int64_t %(name)s_dropped(const %(name)s_context *context);

/* Forget all beyond a length, to which %(name)s_length becomes equal. */
%(NAME)s_API int %(name)s_truncate(%(name)s_context *context, int64_t length);

/* Forget the oldest rows of the growing states, so many of them. Their other rows move to the beginning, which takes about as
 * long as a copy: drop many at a time. A model that compares positions with places in a cache cannot go on from there. */
%(NAME)s_API int %(name)s_drop(%(name)s_context *context, int64_t count);

/* Give the elements of a state (%(NAME)s_STATE_…), dense in C order. They stay until the next function that changes it. */
%(NAME)s_API int %(name)s_state(%(name)s_context *context, size_t state, const void **data, size_t *bytes);

/* Save all states to memory of %(name)s_state_bytes, and go on from there later, in any context of a library of this
 * model. What was damaged, or saved by another model or version of tvmflow, is refused and changes nothing. */
%(NAME)s_API int %(name)s_state_bytes(%(name)s_context *context, size_t *bytes);
%(NAME)s_API int %(name)s_save_state(%(name)s_context *context, void *data, size_t bytes);
%(NAME)s_API int %(name)s_load_state(%(name)s_context *context, const void *data, size_t bytes);

/* Make another context of the same options and weights, with the same states. Growing states share their memory until
 * both contexts have gone on. */
%(NAME)s_API int %(name)s_fork(%(name)s_context *context, %(name)s_context **copy);

/* How the next token is chosen. With all 0, it is the one of the largest logit. */
typedef struct {
  float temperature;        /* what logits are divided by; 0: the largest one is chosen */
  uint32_t top_k;           /* only so many of the largest, at most 1024; 0: all */
  float top_p;              /* only the largest whose probabilities reach this; 0 or 1: all */
  float repetition_penalty; /* what logits of `recent` tokens are divided by, or multiplied if negative; 0 or 1: none */
} %(name)s_sampling;

/* Choose a token by its logits, which the penalty changes. `recent` are the tokens that it is for. The random state is one
 * of the states: it is saved, forked and reset with them. */
%(NAME)s_API int %(name)s_sample(%(name)s_context *context, float *logits, size_t count,
    const %(name)s_sampling *sampling, const int64_t *recent, size_t recent_count, int64_t *token);

/* Choose the random state; a new or reset context has that of 0. */
%(NAME)s_API int %(name)s_seed(%(name)s_context *context, uint64_t seed);

