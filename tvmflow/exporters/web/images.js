/* Images as inputs of a model: resized, cropped or padded as pixels of 8 bits, then numbers by a table. All of it is what
 * `tvmflow.load` computes, bit for bit, from equal pixels. */

const FILTERS = {
  bilinear: { support: 1, value: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: { support: 2, value: cubic },
};
const WEIGHT_BITS = 22;
const GRAY_WEIGHTS = [19595, 38470, 7471];
const MAX_PIXELS = 2 ** 28;
const CHANNELS = { RGB: 3, BGR: 3, GRAY: 1 };

/* The cubic convolution kernel of Keys with a = -0.5, with operations in Pillow's order. */
function cubic(x) {
  const a = -0.5;
  const distance = Math.abs(x);
  if (distance < 1) return ((a + 2) * distance - (a + 3)) * distance * distance + 1;
  if (distance < 2) return (((distance - 5) * distance + 8) * distance - 4) * a;
  return 0;
}

/**
 * Read the pixels of an image, turned upright by its EXIF data. Transparency is left out.
 *
 * @param {Blob | ImageData | CanvasImageSource | {data: Uint8ClampedArray, width: number, height: number}} source
 * @returns {Promise<{data: Uint8ClampedArray, width: number, height: number}>} RGBA.
 */
export async function readPixels(source) {
  if (source?.data && source.width && source.height) {
    if (source.data.length !== 4 * source.width * source.height)
      throw new TypeError("the data of an image must be RGBA, 4 numbers for each pixel");
    return source;
  }
  const options = { colorSpaceConversion: "none", premultiplyAlpha: "none", imageOrientation: "from-image" };
  let bitmap;
  try {
    bitmap = await createImageBitmap(source, options);
  } catch (error) {
    throw new TypeError(`the browser cannot read this image: ${error.message}`);
  }
  const { width, height } = bitmap;
  const canvas =
    typeof OffscreenCanvas === "function"
      ? new OffscreenCanvas(width, height)
      : Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}

/**
 * Make an input of images.
 *
 * @param {object} settings How: those of the recipe, with a table of the number for each level of each channel.
 * @param {Array<{data: Uint8ClampedArray, width: number, height: number}>} images RGBA; the last one fills up the batch.
 * @param {TypedArray} values The input, which is written.
 */
export function preprocess(settings, images, values) {
  const { batch, size, layout } = settings;
  if (!images.length || images.length > batch)
    throw new RangeError(`${images.length} images are given, and a batch has ${batch}`);
  const channels = CHANNELS[settings.colour];
  const [height, width] = size;
  const plane = height * width;
  if (values.length !== batch * channels * plane)
    throw new RangeError(`images have ${height} x ${width} pixels, and the input has another size now`);
  const fitted = images.map((image) => fit(settings, image));
  for (let sample = 0; sample < batch; sample++) {
    const pixels = fitted[Math.min(sample, fitted.length - 1)].data;
    for (let channel = 0; channel < channels; channel++) {
      const table = settings.table.subarray(256 * channel, 256 * (channel + 1));
      const start = sample * channels * plane;
      for (let place = 0; place < plane; place++) {
        const at = layout === "NCHW" ? channel * plane + place : place * channels + channel;
        values[start + at] = table[pixels[place * channels + channel]];
      }
    }
  }
}

/** Return an image in size and colour of an input: `data` are its channels, pixel by pixel. */
export function fit(settings, image) {
  const { size, pad, interpolation } = settings;
  const plain = convertColour(image, settings.colour);
  const [height, width] = resizedSize(settings, plain.height, plain.width);
  if ((height !== plain.height || width !== plain.width) && Math.max(height, plain.height) * width > MAX_PIXELS)
    throw new RangeError(
      `an image of ${plain.width} x ${plain.height} pixels would have ${width} x ${height} when it is resized, ` +
        `and the limit is ${MAX_PIXELS} pixels`);
  const resized = resizeColumns(resizeRows(plain, width, interpolation), height, interpolation);
  const isPadded = pad !== undefined;
  const offsets = [height, width].map((length, axis) =>
    isPadded ? -Math.floor((size[axis] - length) / 2) : cropOffset(length, size[axis]));
  return place(resized, size, offsets, isPadded ? pad : 0);
}

function convertColour({ data, width, height }, colour) {
  const channels = CHANNELS[colour];
  const converted = new Uint8Array(width * height * channels);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const rgb = data.subarray(4 * pixel, 4 * pixel + 3);
    if (channels === 1) {
      const total = GRAY_WEIGHTS[0] * rgb[0] + GRAY_WEIGHTS[1] * rgb[1] + GRAY_WEIGHTS[2] * rgb[2];
      converted[pixel] = (total + 32768) >> 16;
    } else {
      for (let channel = 0; channel < 3; channel++)
        converted[3 * pixel + channel] = rgb[colour === "BGR" ? 2 - channel : channel];
    }
  }
  return { data: converted, width, height, channels };
}

function resizedSize({ resize, pad }, height, width) {
  if (resize === undefined) return [height, width];
  if (typeof resize === "number") {
    // the longer side is rounded down
    const short = Math.min(height, width);
    return [Math.floor((height * resize) / short), Math.floor((width * resize) / short)];
  }
  if (pad === undefined) return resize;
  const [newHeight, newWidth] = resize;
  if (newHeight * width <= newWidth * height)
    return [newHeight, Math.max(1, Math.floor((2 * width * newHeight + height) / (2 * height)))];
  return [Math.max(1, Math.floor((2 * height * newWidth + width) / (2 * width))), newWidth];
}

function cropOffset(size, newSize) {
  if (size < newSize) return -Math.floor((newSize - size) / 2);
  const half = (size - newSize) / 2;
  // halves are rounded to even numbers
  return Number.isInteger(half) ? half : 2 * Math.round(half / 2);
}

/* Return a window of an image that begins at row and column `offsets`; beyond the image it has one level. */
function place({ data, width, height, channels }, [newHeight, newWidth], [top, left], level) {
  const placed = new Uint8Array(newHeight * newWidth * channels).fill(level);
  const start = Math.max(left, 0);
  const end = Math.min(left + newWidth, width);
  for (let row = Math.max(top, 0); row < Math.min(top + newHeight, height); row++) {
    const pixels = data.subarray((row * width + start) * channels, (row * width + end) * channels);
    placed.set(pixels, ((row - top) * newWidth + start - left) * channels);
  }
  return { data: placed, width: newWidth, height: newHeight, channels };
}

/* Return the first input pixel of each output pixel's support, and the weights from there on. */
function computeWeights(size, newSize, interpolation) {
  const filter = FILTERS[interpolation];
  const scale = size / newSize;
  const filterScale = Math.max(scale, 1);
  const support = filter.support * filterScale;
  const taps = Math.ceil(support) * 2 + 1;
  const starts = new Int32Array(newSize);
  const weights = new Float64Array(newSize * taps);
  for (let pixel = 0; pixel < newSize; pixel++) {
    const center = (pixel + 0.5) * scale;
    const start = Math.max(Math.trunc(center - support + 0.5), 0);
    const end = Math.min(Math.trunc(center + support + 0.5), size);
    const own = weights.subarray(pixel * taps, (pixel + 1) * taps);
    let total = 0;
    for (let tap = 0; tap < taps; tap++) {
      const position = tap + start;
      own[tap] = position < end ? filter.value((position - center + 0.5) * (1 / filterScale)) : 0;
      total += own[tap];
    }
    for (let tap = 0; tap < taps; tap++) {
      const fixed = (total === 0 ? own[tap] : own[tap] / total) * 2 ** WEIGHT_BITS;
      own[tap] = Math.trunc(fixed + (fixed < 0 ? -0.5 : 0.5));
    }
    starts[pixel] = start;
  }
  return { starts, weights, taps };
}

/* Sums of products are integers below 2^53, which are exact. */
function round(sum) {
  return Math.min(255, Math.max(0, Math.floor((sum + 2 ** (WEIGHT_BITS - 1)) / 2 ** WEIGHT_BITS)));
}

function resizeRows(image, width, interpolation) {
  if (image.width === width) return image;
  return resample(image, width, interpolation, true);
}

function resizeColumns(image, height, interpolation) {
  if (image.height === height) return image;
  return resample(image, height, interpolation, false);
}

function resample({ data, width, height, channels }, newSize, interpolation, isRow) {
  const size = isRow ? width : height;
  const { starts, weights, taps } = computeWeights(size, newSize, interpolation);
  const [newWidth, newHeight] = isRow ? [newSize, height] : [width, newSize];
  const step = isRow ? channels : width * channels;
  const resized = new Uint8Array(newWidth * newHeight * channels);
  let at = 0;
  for (let row = 0; row < newHeight; row++) {
    for (let column = 0; column < newWidth; column++) {
      const pixel = isRow ? column : row;
      const start = starts[pixel];
      const last = Math.min(taps, size - start);
      const first = ((isRow ? row : start) * width + (isRow ? start : column)) * channels;
      for (let channel = 0; channel < channels; channel++) {
        let sum = 0;
        for (let tap = 0; tap < last; tap++) sum += data[first + tap * step + channel] * weights[pixel * taps + tap];
        resized[at++] = round(sum);
      }
    }
  }
  return { data: resized, width: newWidth, height: newHeight, channels };
}
