/* The directory of thread-local variables of a DLL without Microsoft's C library (Microsoft's PE format, "The .tls
 * Section"). The linker finds it by its name. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

unsigned long _tls_index;
__attribute__((section(".tls"))) char _tls_start;
__attribute__((section(".tls$ZZZ"))) char _tls_end;
static const PIMAGE_TLS_CALLBACK callbacks[] = {NULL};

const IMAGE_TLS_DIRECTORY64 _tls_used = {
    .StartAddressOfRawData = (ULONGLONG)&_tls_start,
    .EndAddressOfRawData = (ULONGLONG)&_tls_end,
    .AddressOfIndex = (ULONGLONG)&_tls_index,
    .AddressOfCallBacks = (ULONGLONG)callbacks,
};
