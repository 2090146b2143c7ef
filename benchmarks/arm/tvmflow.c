/* One counted call of a C library of tvmflow, with one thread, after one that is not counted: program INPUT OUTPUT.
 * Of the library are its header (HEADER) and the prefixes of its names (NAME, PREFIX). Files have raw numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include HEADER

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define OWN(name) JOIN(PREFIX, name)

static void check(int status) {
  if (status == 0) return;
  fprintf(stderr, "%s\n", OWN(_message)(status));
  exit(1);
}

int main(int count, char **arguments) {
  if (count != 3) return 2;
  OWN(_options) options = {.abi = JOIN(NAME, _ABI), .threads = 1};
  OWN(_context) *context;
  check(OWN(_create)(&options, &context));
  OWN(_buffer) inputs[JOIN(NAME, _INPUTS)], outputs[JOIN(NAME, _OUTPUTS)];
  FILE *file = fopen(arguments[1], "rb");
  for (int i = 0; file && i < JOIN(NAME, _INPUTS); ++i) {
    size_t bytes = OWN(_inputs)()[i].bytes;
    inputs[i] = (OWN(_buffer)){aligned_alloc(64, (bytes + 63) / 64 * 64), bytes};
    if (fread(inputs[i].data, 1, bytes, file) != bytes) return 3;
  }
  for (int i = 0; i < JOIN(NAME, _OUTPUTS); ++i) {
    size_t bytes = OWN(_outputs)()[i].bytes;
    outputs[i] = (OWN(_buffer)){aligned_alloc(64, (bytes + 63) / 64 * 64), bytes};
  }
  for (int call = 0; call < 2; ++call) {
    syscall(4095, 1);
    check(OWN(_run)(context, inputs, JOIN(NAME, _INPUTS), outputs, JOIN(NAME, _OUTPUTS)));
  }
  syscall(4095, 2);
  file = fopen(arguments[2], "wb");
  return !file || fwrite(outputs[0].data, 1, outputs[0].bytes, file) != outputs[0].bytes || fclose(file);
}
