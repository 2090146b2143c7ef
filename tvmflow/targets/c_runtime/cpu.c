/* Finds CPU features that the kernels need and this CPU lacks; names are the Linux kernel's. Features that cannot be
 * queried count as present. */
#if defined(TF_CPU_LEVELS) || defined(TF_DEVICE) || defined(TF_LEVEL_VARIABLE)
#if defined(__linux__) && !defined(__ANDROID__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <unistd.h>
#endif

/* Read a variable of the environment. A program with more rights than its user (setuid) reads none, as the user must
 * not choose its code or its files. */
static inline const char *tf_environment(const char *name) {
#ifdef __linux__
  const unsigned long at_secure = 23;
  if (getauxval(at_secure)) return NULL;
#elif defined(__APPLE__)
  if (issetugid()) return NULL;
#endif
  return getenv(name);
}
#endif

#ifdef TF_CPU_LEVELS
/* TVMFLOW_CPU in the environment names a level, whose features alone are used. It adds no features, and an unknown name
 * has no effect. */
static bool tf_is_allowed(const char *name) {
  static const struct {
    const char *name, *features;
  } levels[] = {TF_CPU_LEVELS};
  const char *cap = tf_environment("TVMFLOW_CPU");
  if (!cap || !*cap) return true;
  for (size_t i = 0; i < sizeof levels / sizeof *levels; ++i) {
    if (strcmp(levels[i].name, cap) != 0) continue;
    /* each feature stands between two spaces */
    const size_t length = strlen(name);
    for (const char *at = levels[i].features; (at = strstr(at, name)) != NULL; ++at)
      if (at[-1] == ' ' && at[length] == ' ') return true;
    return false;
  }
  return true;
}
#else
static bool tf_is_allowed(const char *name) { return name != NULL; }
#endif

#if defined(__x86_64__) || defined(__i386__)

#include <cpuid.h>

typedef struct {
  const char *name;
  unsigned leaf, subleaf, word, bit; /* word: 0 for EAX to 3 for EDX */
} tf_feature;

/* Registers that the system must save: 6 for those of AVX, 0xe6 with those of AVX-512, 0x60000 for those of AMX. */
static unsigned tf_saved_states(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
  __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return a;
}

static bool tf_has_feature(const char *name) {
  static const tf_feature features[] = {
      {"sse", 1, 0, 3, 25},          {"sse2", 1, 0, 3, 26},        {"pni", 1, 0, 2, 0},
      {"pclmulqdq", 1, 0, 2, 1},     {"ssse3", 1, 0, 2, 9},        {"fma", 1, 0, 2, 12},
      {"sse4_1", 1, 0, 2, 19},       {"sse4_2", 1, 0, 2, 20},      {"movbe", 1, 0, 2, 22},
      {"popcnt", 1, 0, 2, 23},       {"aes", 1, 0, 2, 25},         {"avx", 1, 0, 2, 28},
      {"f16c", 1, 0, 2, 29},         {"rdrand", 1, 0, 2, 30},      {"bmi1", 7, 0, 1, 3},
      {"avx2", 7, 0, 1, 5},          {"bmi2", 7, 0, 1, 8},         {"avx512f", 7, 0, 1, 16},
      {"avx512dq", 7, 0, 1, 17},     {"rdseed", 7, 0, 1, 18},      {"adx", 7, 0, 1, 19},
      {"avx512ifma", 7, 0, 1, 21},   {"avx512cd", 7, 0, 1, 28},    {"sha_ni", 7, 0, 1, 29},
      {"avx512bw", 7, 0, 1, 30},     {"avx512vl", 7, 0, 1, 31},    {"avx512vbmi", 7, 0, 2, 1},
      {"avx512_vbmi2", 7, 0, 2, 6},  {"gfni", 7, 0, 2, 8},         {"vaes", 7, 0, 2, 9},
      {"vpclmulqdq", 7, 0, 2, 10},   {"avx512_vnni", 7, 0, 2, 11}, {"avx512_bitalg", 7, 0, 2, 12},
      {"avx512_vpopcntdq", 7, 0, 2, 14}, {"avx512_vp2intersect", 7, 0, 3, 8}, {"amx_bf16", 7, 0, 3, 22},
      {"avx512_fp16", 7, 0, 3, 23},  {"amx_tile", 7, 0, 3, 24},    {"amx_int8", 7, 0, 3, 25},
      {"avx_vnni", 7, 1, 0, 4},      {"avx512_bf16", 7, 1, 0, 5},  {"abm", 0x80000001, 0, 2, 5},
      {"sse4a", 0x80000001, 0, 2, 6}, {"xop", 0x80000001, 0, 2, 11}, {"fma4", 0x80000001, 0, 2, 16},
  };
  const unsigned saved = tf_saved_states();
  for (size_t i = 0; i < sizeof features / sizeof *features; ++i) {
    const tf_feature *feature = &features[i];
    if (strcmp(feature->name, name) != 0) continue;
    if (!tf_is_allowed(name)) return false;
    unsigned words[4];
    if (!__get_cpuid_count(feature->leaf, feature->subleaf, &words[0], &words[1], &words[2], &words[3])) return false;
    const bool is_amx = strncmp(name, "amx", 3) == 0, is_wide = strncmp(name, "avx512", 6) == 0;
    const bool is_avx = strncmp(name, "avx", 3) == 0 || strncmp(name, "fma", 3) == 0 || strcmp(name, "f16c") == 0;
    const unsigned states = is_amx ? 0x60000 : is_wide ? 0xe6 : is_avx ? 0x6 : 0;
    return (words[feature->word] >> feature->bit & 1) && (saved & states) == states;
  }
  return true;
}

#elif defined(__linux__) && (defined(__aarch64__) || defined(__arm__))

#ifndef __ANDROID__
#include <sys/auxv.h>
#endif

typedef struct {
  const char *name;
  unsigned type, bit; /* of AT_HWCAP (16) or AT_HWCAP2 (26) */
} tf_feature;

static bool tf_has_feature(const char *name) {
  static const tf_feature features[] = {
#ifdef __aarch64__
      {"fp", 16, 0},      {"asimd", 16, 1},     {"atomics", 16, 8},  {"fphp", 16, 9},     {"asimdhp", 16, 10},
      {"asimdrdm", 16, 12}, {"jscvt", 16, 13},  {"fcma", 16, 14},    {"lrcpc", 16, 15},   {"asimddp", 16, 20},
      {"sve", 16, 22},    {"asimdfhm", 16, 23}, {"uscat", 16, 25},   {"ilrcpc", 16, 26},  {"sve2", 26, 1},
      {"frint", 26, 8},   {"svef32mm", 26, 10}, {"svef64mm", 26, 11}, {"i8mm", 26, 13},   {"bf16", 26, 14},
      {"sme", 26, 23},    {"sme2", 26, 37},
#else
      {"neon", 16, 12},   {"vfp", 16, 6},       {"vfpv3", 16, 13},   {"vfpv4", 16, 16},   {"idiva", 16, 17},
      {"idivt", 16, 18},
#endif
  };
  for (size_t i = 0; i < sizeof features / sizeof *features; ++i)
    if (strcmp(features[i].name, name) == 0)
      return tf_is_allowed(name) && ((uint64_t)getauxval(features[i].type) >> features[i].bit & 1);
  return true;
}

#elif defined(__APPLE__) && defined(__aarch64__)

#include <sys/sysctl.h>

typedef struct {
  const char *name, *key;
} tf_feature;

static bool tf_has_feature(const char *name) {
  static const tf_feature features[] = {
      {"fphp", "hw.optional.arm.FEAT_FP16"}, {"asimdhp", "hw.optional.arm.FEAT_FP16"},
      {"asimdfhm", "hw.optional.arm.FEAT_FHM"}, {"asimddp", "hw.optional.arm.FEAT_DotProd"},
      {"asimdrdm", "hw.optional.arm.FEAT_RDM"}, {"fcma", "hw.optional.arm.FEAT_FCMA"},
      {"jscvt", "hw.optional.arm.FEAT_JSCVT"}, {"frint", "hw.optional.arm.FEAT_FRINTTS"},
      {"bf16", "hw.optional.arm.FEAT_BF16"}, {"i8mm", "hw.optional.arm.FEAT_I8MM"},
      {"atomics", "hw.optional.arm.FEAT_LSE"}, {"uscat", "hw.optional.arm.FEAT_LSE2"},
      {"lrcpc", "hw.optional.arm.FEAT_LRCPC"}, {"ilrcpc", "hw.optional.arm.FEAT_LRCPC2"},
      {"sme", "hw.optional.arm.FEAT_SME"}, {"sme2", "hw.optional.arm.FEAT_SME2"},
  };
  for (size_t i = 0; i < sizeof features / sizeof *features; ++i) {
    if (strcmp(features[i].name, name) != 0) continue;
    if (!tf_is_allowed(name)) return false;
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(features[i].key, &value, &size, NULL, 0) != 0 || value != 0;
  }
  return true;
}

#else

static bool tf_has_feature(const char *name) { return tf_is_allowed(name); }

#endif

const char *TF(missing_feature)(void) {
  static const char *const features[] = {TF_FEATURES NULL};
  for (const char *const *feature = features; *feature; ++feature)
    if (!tf_has_feature(*feature)) return *feature;
  return NULL;
}
