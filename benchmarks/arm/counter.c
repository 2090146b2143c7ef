/* A plugin of qemu's user emulation (its API 1: qemu 6 to 8): how often each block of instructions runs.
 *
 * The program under emulation steers it by a system call that no system has, number 4095: with the argument 1 all
 * counts become 0, with 2 they are written to the file that `out=` names. A line is the count of a block, then its
 * instructions, as hexadecimal words. Programs of one thread only. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
enum { CALL = 4095, RESET = 1, WRITE = 2, BUCKETS = 1 << 14, LONGEST = 2048, ADD = 0 };

/* what is used of qemu-plugin.h, which Debian does not package */
struct qemu_plugin_tb;
struct qemu_plugin_insn;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_syscall_cb(uint64_t, void (*)(uint64_t, unsigned, int64_t, uint64_t, uint64_t,
    uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t));

PUBLIC int qemu_plugin_version = 1;

struct block {
  struct block *next;
  uint64_t count;
  size_t length;
  uint32_t words[];
};

static struct block *blocks[BUCKETS];
static const char *path = "counts";

/* The same instructions at another address are the same block. */
static struct block *find(const uint32_t *words, size_t length) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < length; ++i) hash = (hash ^ words[i]) * 16777619u;
  struct block **place = &blocks[hash % BUCKETS];
  for (struct block *known = *place; known; known = known->next)
    if (known->length == length && !memcmp(known->words, words, 4 * length)) return known;
  struct block *made = calloc(1, sizeof *made + 4 * length);
  if (!made) abort();
  made->length = length;
  memcpy(made->words, words, 4 * length);
  made->next = *place;
  return *place = made;
}

static void translate(uint64_t plugin, struct qemu_plugin_tb *tb) {
  (void)plugin;
  uint32_t words[LONGEST];
  size_t length = qemu_plugin_tb_n_insns(tb);
  if (length > LONGEST) abort();
  for (size_t i = 0; i < length; ++i)
    memcpy(&words[i], qemu_plugin_insn_data(qemu_plugin_tb_get_insn(tb, i)), sizeof words[i]);
  qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD, &find(words, length)->count, 1);
}

static void steer(uint64_t plugin, unsigned cpu, int64_t number, uint64_t what, uint64_t b, uint64_t c, uint64_t d,
    uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
  (void)plugin, (void)cpu, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
  if (number != CALL) return;
  FILE *file = what == WRITE ? fopen(path, "w") : NULL;
  for (int i = 0; i < BUCKETS; ++i)
    for (struct block *block = blocks[i]; block; block = block->next) {
      if (what == RESET) block->count = 0;
      if (!file || !block->count) continue;
      fprintf(file, "%" PRIu64, block->count);
      for (size_t k = 0; k < block->length; ++k) fprintf(file, " %08" PRIx32, block->words[k]);
      fputc('\n', file);
    }
  if (file) fclose(file);
}

PUBLIC int qemu_plugin_install(uint64_t plugin, const void *about, int count, char **arguments) {
  (void)about;
  for (int i = 0; i < count; ++i)
    if (!strncmp(arguments[i], "out=", 4)) path = strdup(arguments[i] + 4);
  qemu_plugin_register_vcpu_tb_trans_cb(plugin, translate);
  qemu_plugin_register_vcpu_syscall_cb(plugin, steer);
  return 0;
}
