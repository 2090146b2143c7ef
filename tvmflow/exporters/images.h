/* Images for the model @TITLE@: pixels of 8 bits become inputs, as in Python bit for bit; and the names of its classes.
 *
 * All of it is in this header, for C99 and C++17. It needs memory from malloc, and nothing of the library:
 *
 *   const @PREFIX@_pixels image = {pixels, 480, 640, 3, 0};
 *   static @TYPE@ input[@COUNT@];
 *   int status = @PREFIX@_preprocess(&image, @PLACE@, 0, input);
 *   if (status != @NAME@_PREPROCESS_OK) puts(@PREFIX@_preprocess_error(status));
 */
#ifndef @NAME@_IMAGES_H_
#define @NAME@_IMAGES_H_

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Rows of pixels from the top, each pixel with 1 (gray), 3 (RGB) or 4 (RGBA, whose alpha is left out) values. */
typedef struct {
  const uint8_t *pixels;
  size_t height;
  size_t width;
  size_t channels;
  size_t row_bytes; /* from the begin of a row to that of the next; 0: rows without padding */
} @PREFIX@_pixels;

/* What @PREFIX@_preprocess returns. */
enum {
  @NAME@_PREPROCESS_OK = 0,
  @NAME@_PREPROCESS_NO_IMAGE = 1,  /* no pixels, not 1, 3 or 4 values a pixel, or rows shorter than their pixels */
  @NAME@_PREPROCESS_TOO_LARGE = 2, /* the resized image would have more than 2^28 pixels */
  @NAME@_PREPROCESS_NO_MEMORY = 3, /* malloc returned NULL */
  @NAME@_PREPROCESS_NO_INPUT = 4   /* there is no such input, it takes no images, or its batch has fewer */
};

/* The names of the classes, in the order of the scores of the first output, and NULL after them. */
#define @NAME@_LABELS @LABEL_COUNT@
static const char *const @PREFIX@_labels[@NAME@_LABELS + 1] = {@LABELS@NULL};

/* ------------------------------------------------------------------ what the recipe says */

/* How an image becomes an input. */
typedef struct {
  size_t input;                         /* its place among the inputs */
  int64_t batch;                        /* the images of the input; below 0: the program chooses */
  size_t height, width, channels;
  size_t resize_height, resize_width;   /* both 0: not resized; the width alone 0: the height is the shorter side */
  int pad;                              /* the level beside an image that keeps its aspect ratio; below 0: none */
  int is_cubic, is_bgr, is_channels_last;
  size_t value_bytes;
  const void *table;                    /* the value for each level of each channel */
} @PREFIX@_preprocessing_;

@TABLES@

static const @PREFIX@_preprocessing_ @PREFIX@_preprocessings_[] = {
@PREPROCESSINGS@
};

/* ------------------------------------------------------------------ resampling */

/* The weights for the pixels of a window of a resized side. */
typedef struct {
  size_t count;     /* the pixels */
  size_t most;      /* the most weights of a pixel */
  size_t *starts;   /* of each pixel: the first source pixel */
  size_t *counts;   /* of each pixel: how many source pixels */
  int32_t *weights; /* `most` for each pixel, with 22 fractional bits */
} @PREFIX@_axis_;

/* Keep a product from becoming one operation with the sum that follows: it would be rounded once instead of twice. */
static inline double @PREFIX@_rounded_(double value) {
  volatile double kept = value;
  return kept;
}

/* The value of a kernel at a distance. The cubic convolution kernel is that of Keys with a = -0.5. */
static inline double @PREFIX@_kernel_(double x, int is_cubic) {
  const double a = -0.5;
  double value;
  if (!is_cubic) return x < 1.0 ? 1.0 - x : 0.0;
  if (x >= 2.0) return 0.0;
  if (x < 1.0) {
    value = @PREFIX@_rounded_((a + 2.0) * x) - (a + 3.0);
    return @PREFIX@_rounded_(@PREFIX@_rounded_(value * x) * x) + 1;
  }
  value = @PREFIX@_rounded_((x - 5) * x) + 8;
  return (@PREFIX@_rounded_(value * x) - 4) * a;
}

/* Allocate so many elements; NULL if their size overflows. */
static inline void *@PREFIX@_allocate_(size_t count, size_t bytes) {
  if (count > (size_t)PTRDIFF_MAX / bytes) return NULL;
  return malloc(count ? count * bytes : 1);
}

static inline void @PREFIX@_free_axis_(@PREFIX@_axis_ *axis) {
  free(axis->starts);
  free(axis->counts);
  free(axis->weights);
}

/* Compute the weights for `count` pixels from `first` on, of a side that is resized: each is a weighted sum of the source
 * pixels in its support, which grows with the reduction. Source: Resample.c of Pillow. Return 0 without memory. */
static inline int @PREFIX@_weigh_(@PREFIX@_axis_ *axis, size_t size, size_t new_size, size_t first, size_t count, int is_cubic) {
  const double scale = (double)size / (double)new_size;
  const double filter_scale = scale > 1.0 ? scale : 1.0, reciprocal = 1.0 / filter_scale;
  const double support = @PREFIX@_rounded_((is_cubic ? 2.0 : 1.0) * filter_scale);
  const double limit = 2.0 * support + 2.0;
  size_t i, tap;
  axis->count = count;
  axis->most = size == new_size ? 1 : limit < (double)size ? (size_t)limit : size;
  axis->starts = (size_t *)@PREFIX@_allocate_(count, sizeof *axis->starts);
  axis->counts = (size_t *)@PREFIX@_allocate_(count, sizeof *axis->counts);
  axis->weights = NULL;
  if (count <= SIZE_MAX / axis->most) axis->weights = (int32_t *)@PREFIX@_allocate_(count * axis->most, sizeof *axis->weights);
  if (!axis->starts || !axis->counts || !axis->weights) return 0;
  for (i = 0; i < count; ++i) {
    const double center = @PREFIX@_rounded_(((double)(first + i) + 0.5) * scale);
    const double begin = center - support + 0.5, end = center + support + 0.5;
    int32_t *weights = axis->weights + i * axis->most;
    double total = 0.0;
    int pass;
    axis->starts[i] = size == new_size ? first + i : begin > 0.0 ? (size_t)begin : 0;
    axis->counts[i] = size == new_size ? 1 : (end < (double)size ? (size_t)end : size) - axis->starts[i];
    weights[0] = 1 << 22;
    if (size == new_size) continue;
    /* first their sum, in this order, then each divided by it */
    for (pass = 0; pass < 2; ++pass) {
      for (tap = 0; tap < axis->counts[i]; ++tap) {
        const double position = (double)(tap + axis->starts[i]) - center + 0.5;
        const double distance = @PREFIX@_rounded_((position < 0 ? -position : position) * reciprocal);
        const double weight = @PREFIX@_kernel_(distance, is_cubic);
        const double fixed = (total != 0.0 ? weight / total : weight) * (1 << 22);
        if (pass) weights[tap] = (int32_t)(fixed + (fixed < 0 ? -0.5 : 0.5));
        else total += weight;
      }
    }
  }
  return 1;
}

/* Return a level from a weighted sum. The shift of a negative number would not be the same everywhere. */
static inline uint8_t @PREFIX@_level_(int32_t sum) {
  const int32_t level = sum < 0 ? 0 : sum >> 22;
  return (uint8_t)(level < 255 ? level : 255);
}

/* ------------------------------------------------------------------ images */

/* Write a row of pixels in the colours of the input; gray is weighed by ITU-R BT.601. */
static inline void @PREFIX@_convert_(const uint8_t *source, size_t width, size_t channels, const @PREFIX@_preprocessing_ *to, uint8_t *target) {
  size_t i;
  for (i = 0; i < width; ++i, source += channels, target += to->channels) {
    const uint8_t red = source[0], green = source[channels == 1 ? 0 : 1], blue = source[channels == 1 ? 0 : 2];
    if (to->channels == 3) {
      target[to->is_bgr ? 2 : 0] = red;
      target[1] = green;
      target[to->is_bgr ? 0 : 2] = blue;
    } else {
      const uint32_t gray = red * UINT32_C(19595) + green * UINT32_C(38470) + blue * UINT32_C(7471) + (UINT32_C(1) << 15);
      target[0] = channels == 1 ? red : (uint8_t)(gray >> 16);
    }
  }
}

/* Compute the size of an image after it is resized. */
static inline void @PREFIX@_resized_size_(uint64_t height, uint64_t width, const @PREFIX@_preprocessing_ *to, uint64_t *new_height, uint64_t *new_width) {
  const uint64_t rows = to->resize_height, columns = to->resize_width, shorter = height < width ? height : width;
  *new_height = rows ? rows : height;
  *new_width = rows ? columns : width;
  if (!rows) return;
  if (!columns) {
    *new_height = height * rows / shorter;
    *new_width = width * rows / shorter;
  } else if (to->pad >= 0 && rows * width <= columns * height) {
    *new_width = (2 * width * rows + height) / (2 * height);
    if (!*new_width) *new_width = 1;
  } else if (to->pad >= 0) {
    *new_height = (2 * height * columns + width) / (2 * width);
    if (!*new_height) *new_height = 1;
  }
}

/* The middle of a resized side: `count` pixels from `first` on, which begin at `offset` of the input. */
typedef struct {
  size_t first, count, offset;
} @PREFIX@_window_;

static inline @PREFIX@_window_ @PREFIX@_center_(size_t size, size_t new_size) {
  @PREFIX@_window_ window = {0, size, 0};
  if (size < new_size) {
    window.offset = (new_size - size) / 2;
  } else {
    /* halves are rounded to even numbers, as Python does */
    window.first = (size - new_size) / 2;
    if ((size - new_size) % 2 && window.first % 2) ++window.first;
    window.count = new_size;
  }
  return window;
}

/* Write the values of a row of levels into the layout of the input. */
static inline void @PREFIX@_write_(const uint8_t *levels, size_t row, const @PREFIX@_preprocessing_ *to, size_t bytes, unsigned char *values) {
  const unsigned char *table = (const unsigned char *)to->table;
  size_t column, channel;
  for (column = 0; column < to->width; ++column) {
    for (channel = 0; channel < to->channels; ++channel) {
      const size_t at = row * to->width + column;
      const size_t place = to->is_channels_last ? at * to->channels + channel : channel * to->height * to->width + at;
      memcpy(values + place * bytes, table + (channel * 256 + *levels++) * bytes, bytes);
    }
  }
}

/* Resize columns from `rows`, those from the first one that is needed, and write the input. */
static inline void @PREFIX@_write_rows_(const uint8_t *rows, const @PREFIX@_axis_ *axis, const @PREFIX@_window_ *down, const @PREFIX@_window_ *across, const @PREFIX@_preprocessing_ *to, int32_t *sums, uint8_t *line, unsigned char *values) {
  const size_t length = across->count * to->channels;
  size_t row, tap, i;
  for (row = 0; row < to->height; ++row) {
    memset(line, to->pad < 0 ? 0 : to->pad, to->width * to->channels);
    if (row >= down->offset && row - down->offset < down->count) {
      const size_t pixel = row - down->offset;
      const uint8_t *source = rows + (axis->starts[pixel] - axis->starts[0]) * length;
      for (i = 0; i < length; ++i) sums[i] = 1 << 21;
      for (tap = 0; tap < axis->counts[pixel]; ++tap, source += length) {
        const int32_t weight = axis->weights[pixel * axis->most + tap];
        for (i = 0; i < length; ++i) sums[i] += weight * source[i];
      }
      for (i = 0; i < length; ++i) line[across->offset * to->channels + i] = @PREFIX@_level_(sums[i]);
    }
    /* a constant number of bytes is copied without a call */
    if (to->value_bytes == 1) @PREFIX@_write_(line, row, to, 1, values);
    if (to->value_bytes == 2) @PREFIX@_write_(line, row, to, 2, values);
    if (to->value_bytes == 4) @PREFIX@_write_(line, row, to, 4, values);
    if (to->value_bytes == 8) @PREFIX@_write_(line, row, to, 8, values);
  }
}

/* Resize a row of pixels in the colours of the input. */
static inline void @PREFIX@_resize_row_(const uint8_t *source, const @PREFIX@_axis_ *axis, size_t channels, uint8_t *target) {
  size_t i, tap, channel;
  for (i = 0; i < axis->count; ++i) {
    for (channel = 0; channel < channels; ++channel) {
      const uint8_t *pixel = source + axis->starts[i] * channels + channel;
      int32_t sum = 1 << 21;
      for (tap = 0; tap < axis->counts[i]; ++tap) sum += axis->weights[i * axis->most + tap] * pixel[tap * channels];
      *target++ = @PREFIX@_level_(sum);
    }
  }
}

/* Return the preprocessing of an input; NULL for one that takes no images. */
static inline const @PREFIX@_preprocessing_ *@PREFIX@_find_preprocessing_(size_t input) {
  size_t i;
  for (i = 0; i < sizeof @PREFIX@_preprocessings_ / sizeof *@PREFIX@_preprocessings_; ++i)
    if (@PREFIX@_preprocessings_[i].input == input) return &@PREFIX@_preprocessings_[i];
  return NULL;
}

/* Write an image into an input: into the memory of the whole input, as image `place` of the batch. */
static inline int @PREFIX@_preprocess(const @PREFIX@_pixels *image, size_t input, size_t place, void *values) {
  const @PREFIX@_preprocessing_ *to = @PREFIX@_find_preprocessing_(input);
  @PREFIX@_axis_ columns = {0, 0, NULL, NULL, NULL}, rows = {0, 0, NULL, NULL, NULL};
  @PREFIX@_window_ down, across;
  uint8_t *pixels = NULL, *resized = NULL, *line = NULL;
  int32_t *sums = NULL;
  uint64_t height, width;
  size_t row_bytes, row, first, count, length;
  int status = @NAME@_PREPROCESS_NO_MEMORY;
  if (!to || !values || (to->batch >= 0 && place >= (uint64_t)to->batch)) return @NAME@_PREPROCESS_NO_INPUT;
  if (!image || !image->pixels || !image->height || !image->width) return @NAME@_PREPROCESS_NO_IMAGE;
  if (image->channels != 1 && image->channels != 3 && image->channels != 4) return @NAME@_PREPROCESS_NO_IMAGE;
  if (image->width > (size_t)PTRDIFF_MAX / image->channels) return @NAME@_PREPROCESS_NO_IMAGE;
  row_bytes = image->row_bytes ? image->row_bytes : image->width * image->channels;
  if (row_bytes < image->width * image->channels) return @NAME@_PREPROCESS_NO_IMAGE;
  if (image->height > (size_t)PTRDIFF_MAX / row_bytes) return @NAME@_PREPROCESS_NO_IMAGE;
  /* so that no product of sizes overflows 64 bits */
  if ((uint64_t)image->height >> 40 || (uint64_t)image->width >> 40) return @NAME@_PREPROCESS_TOO_LARGE;
  @PREFIX@_resized_size_(image->height, image->width, to, &height, &width);
  /* rows are resized first */
  if ((height != image->height || width != image->width) &&
      (height > image->height ? height : image->height) > (UINT64_C(1) << 28) / width) return @NAME@_PREPROCESS_TOO_LARGE;
  down = @PREFIX@_center_((size_t)height, to->height);
  across = @PREFIX@_center_((size_t)width, to->width);
  length = across.count * to->channels;
  if (@PREFIX@_weigh_(&columns, image->width, (size_t)width, across.first, across.count, to->is_cubic) &&
      @PREFIX@_weigh_(&rows, image->height, (size_t)height, down.first, down.count, to->is_cubic)) {
    first = rows.starts[0];
    count = rows.starts[down.count - 1] + rows.counts[down.count - 1] - first;
    pixels = (uint8_t *)@PREFIX@_allocate_(image->width, to->channels);
    resized = (uint8_t *)@PREFIX@_allocate_(count, length);
    line = (uint8_t *)@PREFIX@_allocate_(to->width, to->channels);
    sums = (int32_t *)@PREFIX@_allocate_(length, sizeof *sums);
    if (pixels && resized && line && sums) {
      for (row = 0; row < count; ++row) {
        @PREFIX@_convert_(image->pixels + (first + row) * row_bytes, image->width, image->channels, to, pixels);
        @PREFIX@_resize_row_(pixels, &columns, to->channels, resized + row * length);
      }
      @PREFIX@_write_rows_(resized, &rows, &down, &across, to, sums, line,
          (unsigned char *)values + place * (to->height * to->width * to->channels * to->value_bytes));
      status = @NAME@_PREPROCESS_OK;
    }
  }
  free(sums);
  free(line);
  free(resized);
  free(pixels);
  @PREFIX@_free_axis_(&rows);
  @PREFIX@_free_axis_(&columns);
  return status;
}

/* A sentence for what @PREFIX@_preprocess returned. */
static inline const char *@PREFIX@_preprocess_error(int status) {
  switch (status) {
    case @NAME@_PREPROCESS_OK: return "no error";
    case @NAME@_PREPROCESS_NO_IMAGE: return "an image has pixels of 1, 3 or 4 values, and rows that are as long as these";
    case @NAME@_PREPROCESS_TOO_LARGE: return "the resized image would have more than 268,435,456 pixels: cut the part out of it that the model is to see";
    case @NAME@_PREPROCESS_NO_MEMORY: return "there is not enough memory for the resized image";
    case @NAME@_PREPROCESS_NO_INPUT: return "there is no such input, it takes no images, or its batch has fewer";
    default: return "unknown error";
  }
}

#endif
