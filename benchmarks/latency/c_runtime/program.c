/* Calls one of three kernels as often as the input says; in the place of a model's steps. */
#define TF_PARALLEL_LAUNCH bench_launch
#define TF_ALLOC_WORKSPACE bench_allocate
#define TF_FREE_WORKSPACE bench_free
#define TF_ARENA 64u
#define TF_STAGING 64u
#define TF_SCRATCH 0u
#define TF_KERNELS 3u
#define TF_COUNTS 0u
#define TF_MOST_TASKS 64u
#define TF_INPUTS_BYTES0 64u

#define TF_WEIGHTS bench_weights
static const tf_output_count tf_output_counts[] = {{-1, 0}, {-1, 0}};
const unsigned char bench_weights[1];
int32_t bench_empty(void *);
int32_t bench_empty_loop(void *);
int32_t bench_loop(void *);
static const char *const tf_kernel_names[TF_KERNELS + 1] = {"empty", "empty_loop", "loop", NULL};

static int tf_steps(tf_context *tf, unsigned char *arena, const unsigned char *weights, unsigned char *const *in,
                    unsigned char *const *out) {
  TF_BEGIN(tf, arena, weights, in, out);
  uint32_t *input = (uint32_t *)in[0]; /* the kernel, the number of calls, the amount of work of each */
  for (uint32_t call = 0; call < input[1]; ++call) {
    if (input[0] == 0) TF_CALL(0, 1, bench_empty(input + 2));
    else if (input[0] == 1) TF_CALL(1, 64, bench_empty_loop(input + 2));
    else TF_CALL(2, 64, bench_loop(input + 2));
  }
  return 0;
}
