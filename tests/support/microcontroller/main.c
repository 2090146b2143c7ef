#include <stddef.h>
#include <stdint.h>
#include "digits.h"

/* What the start of a program is on a microcontroller: the stack and the first function, in a table at address 0. */
extern unsigned char stack_end[], data_begin[], data_end[], data_source[], bss_begin[], bss_end[];
void start(void);
__attribute__((section(".vectors"), used)) static void *const vectors[] = {stack_end, (void *)start};

__asm__(".section .rodata\n.balign 64\nimages: .incbin \"images\"\nimages_end:\n");
extern const unsigned char images[], images_end[];

#ifdef WEIGHTS
__asm__(".section .rodata\n.balign 64\nweights: .incbin \"digits.weights\"\nweights_end:\n");
extern const unsigned char weights[], weights_end[];
#endif

static _Alignas(128) unsigned char memory[DIGITS_MEMORY_BYTES];

static void *allocate(void *user, size_t bytes, size_t alignment) {
  (void)user, (void)alignment;
  return bytes <= sizeof memory ? memory : NULL;
}

static void release(void *user, void *block) { (void)user, (void)block; }

void __aeabi_unwind_cpp_pr0(void) {}
void __aeabi_unwind_cpp_pr1(void) {}

/* ARM's semihosting: the emulator does what is asked for. */
static void call_host(int operation, const void *argument) {
  register int number __asm__("r0") = operation;
  register const void *pointer __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xab" : "+r"(number) : "r"(pointer) : "memory");
}

static void print(const char *text) { call_host(4, text); }

static int classify(void) {
  digits_options options = {.abi = DIGITS_ABI, .allocate = allocate, .release = release};
  digits_context *context;
#ifdef WEIGHTS
  if (digits_create(&options, &context) != DIGITS_NO_WEIGHTS) return 4;
  options.weights = weights;
  options.weights_bytes = (size_t)(weights_end - weights);
#endif
  if (digits_create(NULL, &context) != DIGITS_WRONG_OPTION) return 1;
  if (digits_create(&options, &context) != DIGITS_OK) return 2;
  for (const unsigned char *image = images; image < images_end; image += 256) {
    static float scores[10];
    const digits_buffer input = {(void *)image, 256}, output = {scores, sizeof scores};
    if (digits_run(context, &input, 1, &output, 1) != DIGITS_OK) return 3;
    int best = 0;
    for (int label = 1; label < 10; ++label) if (scores[label] > scores[best]) best = label;
    const char line[] = {(char)('0' + best), '\n', '\0'};
    print(line);
  }
  return digits_destroy(context);
}

void start(void) {
  *(volatile uint32_t *)0xE000ED88 |= 0xF << 20; /* floating point */
  for (unsigned char *to = data_begin, *from = data_source; to < data_end;) *to++ = *from++;
  for (unsigned char *to = bss_begin; to < bss_end;) *to++ = 0;
  const int status = classify();
  print(status == 0 ? "done\n" : "failed\n");
  static const uint32_t end[] = {0x20026, 0};
  call_host(0x20, end);
  call_host(0x18, (void *)0x20026);
  for (;;) {}
}
