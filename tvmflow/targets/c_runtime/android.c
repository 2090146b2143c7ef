/* Thread-local variables of a shared library for Android, by the functions that compilers call. The format of libraries
 * has them only since Android 10. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "android.h"

/* The compiler's description of a variable. */
typedef struct {
  size_t bytes, alignment;
  _Atomic uintptr_t key; /* 0 until the first thread uses it, then the key plus 1 */
  const void *initial;
} tf_variable;

void *__emutls_get_address(tf_variable *variable);

static pthread_mutex_t tf_mutex = PTHREAD_MUTEX_INITIALIZER;

static uintptr_t tf_make_key(tf_variable *variable) {
  pthread_mutex_lock(&tf_mutex);
  uintptr_t key = atomic_load(&variable->key);
  if (key == 0) {
    pthread_key_t made;
    /* A function of the C library: it still exists when a thread ends after this library was unloaded. */
    if (pthread_key_create(&made, free) != 0) abort();
    key = (uintptr_t)made + 1;
    atomic_store(&variable->key, key);
  }
  pthread_mutex_unlock(&tf_mutex);
  return key;
}

void *__emutls_get_address(tf_variable *variable) {
  uintptr_t key = atomic_load_explicit(&variable->key, memory_order_acquire);
  if (key == 0) key = tf_make_key(variable);
  void *value = pthread_getspecific((pthread_key_t)(key - 1));
  if (value) return value;
  const size_t alignment = variable->alignment < sizeof(void *) ? sizeof(void *) : variable->alignment;
  if (posix_memalign(&value, alignment, variable->bytes) != 0) abort();
  if (variable->initial) memcpy(value, variable->initial, variable->bytes);
  else memset(value, 0, variable->bytes);
  if (pthread_setspecific((pthread_key_t)(key - 1), value) != 0) abort();
  return value;
}
