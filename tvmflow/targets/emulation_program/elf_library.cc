#include "elf_library.h"

#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "imports.h"
#include "module_internal.h"

namespace tvmflow {
namespace {

#if __SIZEOF_POINTER__ == 8
#define ELF(name) Elf64_##name
constexpr unsigned char kClass = ELFCLASS64;
constexpr uint32_t RelocationType(uint64_t info) { return ELF64_R_TYPE(info); }
constexpr uint32_t RelocationSymbol(uint64_t info) { return ELF64_R_SYM(info); }
#else
#define ELF(name) Elf32_##name
constexpr unsigned char kClass = ELFCLASS32;
constexpr uint32_t RelocationType(uint32_t info) { return ELF32_R_TYPE(info); }
constexpr uint32_t RelocationSymbol(uint32_t info) { return ELF32_R_SYM(info); }
#endif

// Each architecture's names of the few relocations that a library of kernels has: the address of
// the library, or that of a symbol, is added to a word.
#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
constexpr uint32_t kRelative = R_X86_64_RELATIVE;
constexpr uint32_t kSymbolic[] = {R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT};
#elif defined(__aarch64__)
constexpr uint16_t kMachine = EM_AARCH64;
constexpr uint32_t kRelative = R_AARCH64_RELATIVE;
constexpr uint32_t kSymbolic[] = {R_AARCH64_ABS64, R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT};
#elif defined(__riscv) && __riscv_xlen == 64
constexpr uint16_t kMachine = EM_RISCV;
constexpr uint32_t kRelative = R_RISCV_RELATIVE;
constexpr uint32_t kSymbolic[] = {R_RISCV_64, R_RISCV_JUMP_SLOT};
#elif defined(__arm__)
constexpr uint16_t kMachine = EM_ARM;
constexpr uint32_t kRelative = R_ARM_RELATIVE;
constexpr uint32_t kSymbolic[] = {R_ARM_ABS32, R_ARM_GLOB_DAT, R_ARM_JUMP_SLOT};
constexpr uint32_t kJumpSlot = R_ARM_JUMP_SLOT;
#else
#error "the relocations of this architecture are not known"
#endif

[[noreturn]] void Fail(const std::string& message) { throw std::runtime_error(message); }

class ElfLibrary final : public tvm::ffi::Library {
 public:
  explicit ElfLibrary(const std::string& path) : path_(path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) Fail("cannot read " + path);
    const std::vector<char> file(std::istreambuf_iterator<char>(stream), {});
    const auto* header = CheckHeader(file);
    const auto* first = reinterpret_cast<const ELF(Phdr)*>(file.data() + header->e_phoff);
    const std::vector<ELF(Phdr)> segments(first, first + header->e_phnum);
    Map(segments, file);
    Link(segments);
    Protect(segments);
    Initialize();
  }

  ~ElfLibrary() final {
    if (memory_ != nullptr) munmap(memory_, size_);
  }

  void* GetSymbol(const tvm::ffi::String& name) final {
    const auto symbol = symbols_.find(name);
    return symbol == symbols_.end() ? nullptr : symbol->second;
  }

 private:
  const ELF(Ehdr)* CheckHeader(const std::vector<char>& file) const {
    const auto* header = reinterpret_cast<const ELF(Ehdr)*>(file.data());
    if (file.size() < sizeof(*header) || std::memcmp(file.data(), ELFMAG, SELFMAG) != 0) {
      Fail(path_ + " is not an ELF file");
    }
    if (header->e_ident[EI_CLASS] != kClass || header->e_machine != kMachine) {
      Fail(path_ + " is for another architecture: machine " + std::to_string(header->e_machine) +
             ", not " + std::to_string(kMachine));
    }
    if (header->e_type != ET_DYN) Fail(path_ + " is not a shared library");
    if (header->e_phoff + header->e_phnum * sizeof(ELF(Phdr)) > file.size()) FailAsDamaged();
    return header;
  }

  // Copies the segments into one new block of memory, at the offsets for which they are linked.
  void Map(const std::vector<ELF(Phdr)>& segments, const std::vector<char>& file) {
    size_t end = 0, alignment = sysconf(_SC_PAGESIZE);
    for (const auto& segment : segments) {
      if (segment.p_type == PT_TLS) Fail(path_ + " has thread-local variables");
      if (segment.p_type != PT_LOAD) continue;
      if (segment.p_offset + segment.p_filesz > file.size() || segment.p_filesz > segment.p_memsz) FailAsDamaged();
      end = std::max<size_t>(end, segment.p_vaddr + segment.p_memsz);
      alignment = std::max<size_t>(alignment, segment.p_align);
    }
    size_ = end + alignment;
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) {
      memory_ = nullptr;
      Fail("not enough memory for " + path_);
    }
    const auto start = reinterpret_cast<uintptr_t>(memory_);
    base_ = reinterpret_cast<char*>((start + alignment - 1) / alignment * alignment);
    for (const auto& segment : segments) {
      if (segment.p_type != PT_LOAD) continue;
      std::memcpy(base_ + segment.p_vaddr, file.data() + segment.p_offset, segment.p_filesz);
    }
  }

  // Reads the dynamic section and the symbols, and applies the relocations.
  void Link(const std::vector<ELF(Phdr)>& segments) {
    for (const auto& segment : segments) {
      if (segment.p_type != PT_DYNAMIC) continue;
      const auto* entry = reinterpret_cast<const ELF(Dyn)*>(base_ + segment.p_vaddr);
      for (; entry->d_tag != DT_NULL; ++entry) dynamic_[entry->d_tag] = entry->d_un.d_val;
    }
    if (!dynamic_.count(DT_SYMTAB) || !dynamic_.count(DT_STRTAB)) FailAsDamaged();
    table_ = At<ELF(Sym)>(DT_SYMTAB);
    const size_t count = SymbolCount();
    for (size_t i = 1; i < count; ++i) {
      if (table_[i].st_shndx != SHN_UNDEF) symbols_[Name(i)] = base_ + table_[i].st_value;
    }
    Relocate<ELF(Rela)>(DT_RELA, DT_RELASZ);
    Relocate<ELF(Rel)>(DT_REL, DT_RELSZ);
    if (dynamic_[DT_PLTREL] == DT_RELA) {
      Relocate<ELF(Rela)>(DT_JMPREL, DT_PLTRELSZ);
    } else {
      Relocate<ELF(Rel)>(DT_JMPREL, DT_PLTRELSZ);
    }
    if (!missing_.empty()) {
      std::string names;
      for (const auto& name : missing_) names += " " + name;
      Fail(path_ + " needs symbols that neither TVM's runtime nor the C library has:" + names);
    }
  }

  // The number of symbols is not stored: it follows from the hash table.
  size_t SymbolCount() const {
    if (dynamic_.count(DT_HASH)) return At<uint32_t>(DT_HASH)[1];
    if (!dynamic_.count(DT_GNU_HASH)) FailAsDamaged();
    const uint32_t* hash = At<uint32_t>(DT_GNU_HASH);
    const uint32_t buckets = hash[0], first = hash[1], words = hash[2];
    const uint32_t* bucket = hash + 4 + words * (sizeof(ELF(Addr)) / sizeof(uint32_t));
    const uint32_t* chain = bucket + buckets;
    uint32_t last = *std::max_element(bucket, bucket + buckets);
    if (last < first) return first;
    // The last entry of a chain is odd.
    while ((chain[last - first] & 1) == 0) ++last;
    return last + 1;
  }

  template <typename Relocation>
  void Relocate(ELF(Sxword) address, ELF(Sxword) bytes) {
    if (!dynamic_.count(address)) return;
    const Relocation* entry = At<Relocation>(address);
    for (const Relocation* end = entry + dynamic_[bytes] / sizeof(Relocation); entry < end; ++entry) {
      auto* word = reinterpret_cast<uintptr_t*>(base_ + entry->r_offset);
      const uint32_t type = RelocationType(entry->r_info);
      if (type == kRelative) {
        *word = reinterpret_cast<uintptr_t>(base_) + Addend(*entry, *word);
      } else if (std::find(std::begin(kSymbolic), std::end(kSymbolic), type) != std::end(kSymbolic)) {
        *word = Symbol(RelocationSymbol(entry->r_info)) + Addend(*entry, *word);
      } else {
        Fail(path_ + " has a relocation of an unknown type: " + std::to_string(type));
      }
    }
  }

  static uintptr_t Addend(const ELF(Rela) & relocation, uintptr_t) { return relocation.r_addend; }
  static uintptr_t Addend(const ELF(Rel) & relocation, uintptr_t word) {
#ifdef __arm__
    // the word is an address in the procedure linkage table
    if (RelocationType(relocation.r_info) == kJumpSlot) return 0;
#endif
    return word;
  }

  uintptr_t Symbol(uint32_t index) {
    const ELF(Sym)& symbol = table_[index];
    if (symbol.st_shndx != SHN_UNDEF) return reinterpret_cast<uintptr_t>(base_ + symbol.st_value);
    const void* address = FindImport(Name(index));
    // The upper half of st_info is the binding, in 32 bits and in 64.
    if (address == nullptr && ELF32_ST_BIND(symbol.st_info) != STB_WEAK) {
      missing_.emplace_back(Name(index));
    }
    return reinterpret_cast<uintptr_t>(address);
  }

  // Sets the access rights of each segment: code can no longer be written.
  void Protect(const std::vector<ELF(Phdr)>& segments) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (const auto& segment : segments) {
      if (segment.p_type != PT_LOAD) continue;
      char* start = base_ + segment.p_vaddr / page * page;
      char* end = base_ + segment.p_vaddr + segment.p_memsz;
      const int rights = (segment.p_flags & PF_R ? PROT_READ : 0) | (segment.p_flags & PF_W ? PROT_WRITE : 0) |
                         (segment.p_flags & PF_X ? PROT_EXEC : 0);
      if (mprotect(start, end - start, rights) != 0) Fail("cannot protect the memory of " + path_);
      if (segment.p_flags & PF_X) __builtin___clear_cache(start, end);
    }
  }

  void Initialize() {
    if (!dynamic_.count(DT_INIT_ARRAY)) return;
    const auto* function = At<uintptr_t>(DT_INIT_ARRAY);
    for (const auto* end = function + dynamic_[DT_INIT_ARRAYSZ] / sizeof(*function); function < end; ++function) {
      reinterpret_cast<void (*)()>(*function)();
    }
  }

  template <typename T>
  const T* At(ELF(Sxword) tag) const {
    return reinterpret_cast<const T*>(base_ + dynamic_.at(tag));
  }
  const char* Name(uint32_t index) const { return At<char>(DT_STRTAB) + table_[index].st_name; }
  [[noreturn]] void FailAsDamaged() const { Fail(path_ + " is damaged"); }

  const std::string path_;
  void* memory_ = nullptr;
  size_t size_ = 0;
  char* base_ = nullptr;
  const ELF(Sym)* table_ = nullptr;
  std::unordered_map<int64_t, uintptr_t> dynamic_;
  std::unordered_map<std::string, void*> symbols_;
  std::vector<std::string> missing_;
};

}  // namespace

tvm::ffi::Module LoadElfLibrary(const std::string& path) {
  // TVM lets the library's functions call the runtime.
  return tvm::ffi::CreateLibraryModule(tvm::ffi::make_object<ElfLibrary>(path));
}

}  // namespace tvmflow
