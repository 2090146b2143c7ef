/* A library to preload: every program sees a Haswell, a CPU with AVX2 and without AVX-512, on a newer one of Intel.
 *
 *     gcc -O1 -shared -fPIC benchmarks/avx2.c -o /tmp/avx2.so
 *     LD_PRELOAD=/tmp/avx2.so python benchmarks/zoo.py FOLDER --threads 1
 *
 * So tvmflow and its peers take their code for AVX2, also those that cannot be told which code to take. Linux lets the
 * CPU fault on `cpuid` (arch_prctl, ARCH_SET_CPUID; /proc/cpuinfo lists cpuid_fault), and the handler here answers.
 * Threads and child processes inherit it. Handlers of SIGSEGV that a program installs itself are ignored. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012, HASWELL = 0x306f2, LAST_LEAF_OF_HASWELL = 0xd, HYPERVISOR = 0x40000000 };
enum { SAVED_STATE = 7, SAVED_BYTES = 832 };

/* of leaf 7: AVX-512 (F, DQ, IFMA, PF, ER, CD, BW, VL) and SHA; VBMI and what came with it, VAES, GFNI, VNNI,
 * BITALG, POPCNTDQ; AVX-512 4VNNIW, 4FMAPS, VP2INTERSECT, AMX and FP16 */
enum { EBX = 0xfc230000u, ECX = 0x5f42, EDX = 0x3c0010c };

typedef int (*Sigaction)(int, const struct sigaction *, struct sigaction *);
static struct sigaction first;

static Sigaction find_sigaction(void) { return (Sigaction)dlsym(RTLD_NEXT, "sigaction"); }

static void answer_cpuid(int number, siginfo_t *info, void *data) {
  greg_t *registers = ((ucontext_t *)data)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)registers[REG_RIP];
  uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
  (void)number;
  if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {
    find_sigaction()(SIGSEGV, &first, NULL); /* a real fault: it happens again, and is handled as usual */
    return;
  }
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  if (leaf == 1) a = HASWELL;
  if (leaf == 7 && part == 0) a = 0, b &= ~EBX, c &= ~ECX, d &= ~EDX;
  if (leaf == 7 && part > 0) a = b = c = d = 0;
  if (leaf == 0xd && part == 0) a &= SAVED_STATE, b = c = SAVED_BYTES;
  if (leaf > LAST_LEAF_OF_HASWELL && leaf < HYPERVISOR) a = b = c = d = 0;
  registers[REG_RAX] = a;
  registers[REG_RBX] = b;
  registers[REG_RCX] = c;
  registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
  return find_sigaction()(number, number == SIGSEGV ? NULL : action, old);
}

sighandler_t signal(int number, sighandler_t handler) {
  typedef sighandler_t (*Signal)(int, sighandler_t);
  return number == SIGSEGV ? SIG_DFL : ((Signal)dlsym(RTLD_NEXT, "signal"))(number, handler);
}

__attribute__((constructor(101))) static void start(void) {
  struct sigaction action = {.sa_sigaction = answer_cpuid, .sa_flags = SA_SIGINFO | SA_NODEFER};
  find_sigaction()(SIGSEGV, &action, &first);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) perror("arch_prctl(ARCH_SET_CPUID)");
}
