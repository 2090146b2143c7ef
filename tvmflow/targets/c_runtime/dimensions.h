
/* What functions return for dimensions. */
enum {
  %(NAME)s_WRONG_DIMENSION = 18 /* a dimension has a size that it cannot have: %(ranges)s */
};
//----
/* The dimensions: sizes of inputs that each call chooses, and that sizes of outputs follow. There are %(NAME)s_DIMENSIONS of
 * them, in the order of their places. Sizes are from `min` to `max`, and multiples of `multiple_of`.
 *
 * In the descriptions of tensors, a size that depends on them is -1, and `bytes` is that of the largest tensor. */
typedef struct {
  const char *name;
  int64_t min;
  int64_t max;
  int64_t multiple_of;
} %(name)s_dimension;
%(NAME)s_API const %(name)s_dimension *%(name)s_dimensions(void);

/* Choose the size of a dimension for the next calls of a context; a new context has the smallest ones. The memory of the
 * context grows in the next call, where that needs more than all before, and never shrinks: a call with sizes that the
 * context has seen allocates nothing. */
%(NAME)s_API int %(name)s_set_dimension(%(name)s_context *context, size_t dimension, int64_t size);

/* The size of a dimension; -1 where there is no such dimension. */
%(NAME)s_API int64_t %(name)s_get_dimension(const %(name)s_context *context, size_t dimension);

/* Choose the sizes of all dimensions of an input by its shape. */
%(NAME)s_API int %(name)s_set_input_shape(
    %(name)s_context *context, size_t input, const int64_t *shape, size_t rank);

/* Write the shape that an input must have in the next call, as many sizes as the description has. That of an output is
 * known before the call as well: %(name)s_output_shape writes it. */
%(NAME)s_API int %(name)s_input_shape(%(name)s_context *context, size_t input, int64_t *shape);

/* Write the bytes that an input or output has in the next call. */
%(NAME)s_API int %(name)s_input_bytes(%(name)s_context *context, size_t input, size_t *bytes);
%(NAME)s_API int %(name)s_output_bytes(%(name)s_context *context, size_t output, size_t *bytes);

