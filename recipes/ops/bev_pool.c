/* The pooling of Lift, Splat, Shoot (Philion and Fidler, 2020): one call computes one channel of the grid. */
#include <stdint.h>

void bev_pool(const float *features, const float *depths, const int32_t *cells, float *grid, int64_t channel,
              int64_t cameras, int64_t channels, int64_t bins, int64_t pixels, int64_t size) {
  float *plane = grid + channel * size;
  for (int64_t cell = 0; cell < size; cell++) {
    plane[cell] = 0;
  }
  for (int64_t camera = 0; camera < cameras; camera++) {
    const float *feature = features + (camera * channels + channel) * pixels;
    for (int64_t bin = 0; bin < bins; bin++) {
      const int64_t first = (camera * bins + bin) * pixels;
      for (int64_t pixel = 0; pixel < pixels; pixel++) {
        const int32_t cell = cells[first + pixel];
        if (cell >= 0 && cell < size) {
          plane[cell] += feature[pixel] * depths[first + pixel];
        }
      }
    }
  }
}
