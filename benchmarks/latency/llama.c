// A small interface to libllama for benchmarks/decode.py, which loads it with ctypes.
#include "llama.h"

static void drop(enum ggml_log_level level, const char *text, void *data) { (void)level, (void)text, (void)data; }

void *bench_open(const char *path, int threads, int tokens, int is_float32) {
  llama_log_set(drop, 0);
  llama_backend_init();
  ggml_backend_load_all();
  struct llama_model *model = llama_model_load_from_file(path, llama_model_default_params());
  if (!model) return 0;
  struct llama_context_params params = llama_context_default_params();
  params.n_ctx = tokens;
  params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = threads;
  if (is_float32) params.type_k = params.type_v = GGML_TYPE_F32;
  return llama_init_from_model(model, params);
}

// Compute the logits of the last of `count` new tokens; 0 if it fails.
const float *bench_step(void *context, int *tokens, int count) {
  if (llama_decode(context, llama_batch_get_one(tokens, count))) return 0;
  llama_synchronize(context);
  return llama_get_logits_ith(context, -1);
}

void bench_truncate(void *context, int length) { llama_memory_seq_rm(llama_get_memory(context), 0, length, -1); }
