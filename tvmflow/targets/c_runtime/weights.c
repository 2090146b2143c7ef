/* The weights of a library: its own constants, or a file that the program names or has in memory. */
#ifndef TF_WEIGHTS_HEAD

static int tf_open_weights(tf_context *context) {
  /* No constant address: weights may be out of the range of relative addresses. */
  const unsigned char *volatile weights = TF_WEIGHTS;
  context->weights = weights;
  return TF_STATUS(OK);
}

static void tf_close_weights(tf_context *context) { (void)context; }

#else

/* The head of a file that was built with this library: magic, version, sizes and a digest. */
static const unsigned char tf_weights_head[] = {TF_WEIGHTS_HEAD};

#ifdef _WIN32

/* Windows has an encoding of its own for file names. */
static int tf_open_file(const tf_options *options, HANDLE *file) {
  const int length = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, options->weights_file, -1, NULL, 0);
  if (length <= 0) return TF_STATUS(UNREADABLE_WEIGHTS);
  void *name;
  const int status = tf_allocate(options, (size_t)length * sizeof(wchar_t), TF_ALIGNMENT, &name);
  if (status != TF_STATUS(OK)) return status;
  MultiByteToWideChar(CP_UTF8, 0, options->weights_file, -1, name, length);
  *file = CreateFileW(name, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL, OPEN_EXISTING, 0, NULL);
  options->release(options->user, name);
  return *file == INVALID_HANDLE_VALUE ? TF_STATUS(UNREADABLE_WEIGHTS) : TF_STATUS(OK);
}

static int tf_map_file(const tf_options *options, tf_buffer *mapped) {
  HANDLE file, mapping = NULL;
  LARGE_INTEGER size;
  int status = tf_open_file(options, &file);
  if (status != TF_STATUS(OK)) return status;
  if (GetFileType(file) != FILE_TYPE_DISK || !GetFileSizeEx(file, &size)) {
    status = TF_STATUS(UNREADABLE_WEIGHTS);
  } else if ((uint64_t)size.QuadPart < sizeof tf_weights_head) {
    status = TF_STATUS(SHORT_WEIGHTS);
  } else {
    mapped->bytes = (size_t)size.QuadPart;
    mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
    mapped->data = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0) : NULL;
    if (!mapped->data) status = TF_STATUS(UNREADABLE_WEIGHTS);
  }
  /* The mapped memory stays. */
  if (mapping) CloseHandle(mapping);
  CloseHandle(file);
  return status;
}

static void tf_unmap_file(const tf_buffer *mapped) { UnmapViewOfFile(mapped->data); }

#elif defined(TF_MAPS_FILES)

static int tf_map_file(const tf_options *options, tf_buffer *mapped) {
  /* Opening a named pipe would wait for a writer. */
  const int file = open(options->weights_file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return TF_STATUS(UNREADABLE_WEIGHTS);
  int status = TF_STATUS(OK);
  struct stat found;
  if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || (uint64_t)found.st_size > SIZE_MAX) {
    status = TF_STATUS(UNREADABLE_WEIGHTS);
  } else if ((size_t)found.st_size < sizeof tf_weights_head) {
    status = TF_STATUS(SHORT_WEIGHTS);
  } else {
    void *data = mmap(NULL, (size_t)found.st_size, PROT_READ, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) status = TF_STATUS(UNREADABLE_WEIGHTS);
    else *mapped = (tf_buffer){data, (size_t)found.st_size};
  }
  /* The mapped memory stays. */
  close(file);
  return status;
}

static void tf_unmap_file(const tf_buffer *mapped) { munmap(mapped->data, mapped->bytes); }

#endif

static int tf_check_weights(const unsigned char *file, size_t bytes) {
  unsigned char difference = 0;
  if (bytes < sizeof tf_weights_head) return TF_STATUS(SHORT_WEIGHTS);
  for (size_t i = 0; i < sizeof tf_weights_head; ++i) difference |= file[i] ^ tf_weights_head[i];
  if (difference) return TF_STATUS(WRONG_WEIGHTS);
  return bytes < TF_WEIGHTS_BEGIN + TF_WEIGHTS_BYTES ? TF_STATUS(SHORT_WEIGHTS) : TF_STATUS(OK);
}

static void tf_close_weights(tf_context *context) {
#ifdef TF_MAPS_FILES
  if (context->mapped.data) tf_unmap_file(&context->mapped);
#else
  (void)context;
#endif
}

static int tf_open_weights(tf_context *context) {
  const tf_options *options = &context->options;
  const unsigned char *file = options->weights;
  size_t bytes = options->weights_bytes;
  if ((uintptr_t)file % TF_ALIGNMENT != 0) return TF_STATUS(MISPLACED_WEIGHTS);
#ifdef TF_MAPS_FILES
  if (options->weights_file) {
    if (file) return TF_STATUS(MISPLACED_WEIGHTS);
    const int mapped = tf_map_file(options, &context->mapped);
    if (mapped != TF_STATUS(OK)) return mapped;
    file = context->mapped.data;
    bytes = context->mapped.bytes;
  }
#endif
  if (!file) return TF_STATUS(NO_WEIGHTS);
  const int status = tf_check_weights(file, bytes);
  if (status != TF_STATUS(OK)) tf_close_weights(context);
  context->weights = file + TF_WEIGHTS_BEGIN;
  return status;
}

#endif
