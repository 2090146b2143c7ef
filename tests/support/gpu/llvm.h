// What LLVM's code for GPUs calls of the hardware, for this machine's CPU. Its names are those of LLVM's intrinsics.

#include "kernels.h"

extern "C" {

#define INDEX(name, index)                                             \
  int nvvm_read_ptx_sreg_##name##_x() { return static_cast<int>(index.x); } \
  int nvvm_read_ptx_sreg_##name##_y() { return static_cast<int>(index.y); } \
  int nvvm_read_ptx_sreg_##name##_z() { return static_cast<int>(index.z); }
INDEX(tid, threadIdx)
INDEX(ctaid, blockIdx)

void nvvm_barrier_cta_sync_aligned_all(int) { __syncthreads(); }
void nvvm_bar_warp_sync(int) { __syncwarp(); }

// A shuffle names the lane up or down to which threads read each other's values, and above it the size of a segment.
#define SHUFFLES(type, name)                                                                                   \
  type nvvm_shfl_sync_down_##name(int mask, type value, int by, int clamp) {                                   \
    return __shfl_down_sync(mask, value, by, WARP - (clamp >> 8));                                             \
  }                                                                                                            \
  type nvvm_shfl_sync_up_##name(int mask, type value, int by, int clamp) {                                     \
    return __shfl_up_sync(mask, value, by, WARP - (clamp >> 8));                                               \
  }                                                                                                            \
  type nvvm_shfl_sync_idx_##name(int mask, type value, int lane, int clamp) {                                  \
    return __shfl_sync(mask, value, lane, WARP - (clamp >> 8));                                                \
  }
SHUFFLES(float, f32)
SHUFFLES(int, i32)

// What libdevice is made of.
float nvvm_fabs_f32(float x) { return fabsf(x); }
float nvvm_ex2_approx_ftz_f32(float x) { return exp2f(x); }
float nvvm_lg2_approx_ftz_f(float x) { return log2f(x); }
float nvvm_rcp_approx_ftz_f(float x) { return 1.0f / x; }
float nvvm_rsqrt_approx_f(float x) { return 1.0f / sqrtf(x); }
float nvvm_saturate_f(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
float nvvm_fma_rm_f(float a, float b, float c) {
  // toward minus infinity
  const double exact = static_cast<double>(a) * b + c;
  const float nearest = static_cast<float>(exact);
  return nearest > exact ? nextafterf(nearest, -HUGE_VALF) : nearest;
}
float nvvm_fma_rz_f(float a, float b, float c) {
  // toward zero
  const double exact = static_cast<double>(a) * b + c;
  const float nearest = static_cast<float>(exact);
  return fabs(static_cast<double>(nearest)) > fabs(exact) ? nextafterf(nearest, 0.0f) : nearest;
}
float nvvm_add_rz_f(float a, float b) { return nvvm_fma_rz_f(a, 1.0f, b); }
float nvvm_div_approx_f(float a, float b) { return a / b; }
float nvvm_sqrt_approx_f(float x) { return sqrtf(x); }
float nvvm_ex2_approx_f32(float x) { return exp2f(x); }
float nvvm_rsqrt_approx_ftz_f(float x) { return 1.0f / sqrtf(x); }
int nvvm_f2i_rn(float x) { return static_cast<int>(rintf(x)); }
float nvvm_fma_rn_f(float a, float b, float c) { return fmaf(a, b, c); }
float nvvm_add_rn_f(float a, float b) { return a + b; }
float nvvm_mul_rn_f(float a, float b) { return a * b; }
float nvvm_floor_f(float x) { return floorf(x); }
float nvvm_ceil_f(float x) { return ceilf(x); }
float nvvm_trunc_f(float x) { return truncf(x); }
float nvvm_round_f(float x) { return rintf(x); }

}  // extern "C"
