/* States to which a step appends in place: the axis along which they grow is outermost in memory, so that the rows
 * before a step are the beginning of those after it. A call that is handed states gets them in the layout of the model. */

/* Copy rows from the layout of the model, `outer` blocks one after the other, to one with the rows outermost. */
static void tf_move_in(unsigned char *inside, const unsigned char *outside, size_t outer, size_t rows, size_t bytes) {
  for (size_t block = 0; block < outer; ++block)
    for (size_t row = 0; row < rows; ++row)
      memcpy(inside + (row * outer + block) * bytes, outside + (block * rows + row) * bytes, bytes);
}

static void tf_move_out(unsigned char *outside, const unsigned char *inside, size_t outer, size_t rows, size_t bytes) {
  for (size_t block = 0; block < outer; ++block)
    for (size_t row = 0; row < rows; ++row)
      memcpy(outside + (block * rows + row) * bytes, inside + (row * outer + block) * bytes, bytes);
}

static size_t tf_count_rows(const tf_appended *state, size_t bytes) { return bytes / (state->outer * state->row); }

/* Run the steps of a call that is handed states: on copies of them. */
static int tf_run_with_states(tf_context *context, const tf_buffer *inputs, const tf_buffer *outputs) {
  const size_t count = sizeof tf_appended_states / sizeof *tf_appended_states;
  const tf_options *options = &context->options;
  tf_buffer in[TF_STATUS(INPUTS)], out[TF_STATUS(OUTPUTS)];
  memcpy(in, inputs, sizeof in);
  memcpy(out, outputs, sizeof out);
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += tf_padded(outputs[tf_appended_states[i].output].bytes);
  void *memory;
  int status = tf_allocate(options, bytes + TF_CACHE_LINE, TF_CACHE_LINE, &memory);
  if (status != TF_STATUS(OK)) return status;
  unsigned char *place = memory;
  for (size_t i = 0; i < count; ++i) {
    const tf_appended *state = &tf_appended_states[i];
    const tf_buffer *before = &inputs[state->input];
    tf_move_in(place, before->data, state->outer, tf_count_rows(state, before->bytes), state->row);
    in[state->input].data = out[state->output].data = place;
    place += tf_padded(outputs[state->output].bytes);
  }
  status = tf_run_aligned(context, in, out);
  for (size_t i = 0; i < count && status == TF_STATUS(OK); ++i) {
    const tf_appended *state = &tf_appended_states[i];
    const tf_buffer *after = &outputs[state->output];
    tf_move_out(after->data, out[state->output].data, state->outer, tf_count_rows(state, after->bytes), state->row);
  }
  options->release(options->user, memory);
  return status;
}
