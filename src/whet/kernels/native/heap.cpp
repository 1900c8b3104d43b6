// Lets torch take the place of a block that was freed for another one of its size.
//
// torch asks glibc for blocks with posix_memalign(64, size). glibc then looks for a free place of
// size + 96 bytes, aligns inside it, and gives the rest back: a place that such a block has left is never large enough
// for the next one of its size. Passes whose blocks have the same few sizes leave a heap of gaps, up to several times
// what is alive. `malloc` has no such condition, and a block in a place that begins at a multiple of 64 bytes is aligned
// as it is. So whet tries `malloc` first, of sizes that keep the next block aligned as well. Blocks are freed as ever.
#include <cstdlib>

#if defined(__linux__) && defined(__GLIBC__)
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t ALIGNED = 64, LEAST = 4096;
constexpr size_t OVERHEAD = 16;  // of glibc's, in front of a block

int posix_memalign_again(void** place, size_t alignment, size_t size) {
  if (alignment != ALIGNED || size < LEAST || size > SIZE_MAX / 2) return posix_memalign(place, alignment, size);
  const size_t wanted = (size + OVERHEAD + ALIGNED - 1) / ALIGNED * ALIGNED - OVERHEAD;
  void* block = std::malloc(wanted);
  if (!block) return ENOMEM;
  if (reinterpret_cast<uintptr_t>(block) % ALIGNED == 0) {
    *place = block;
    return 0;
  }
  std::free(block);
  return posix_memalign(place, alignment, wanted);
}

bool is_torch(const char* path) {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash ? slash + 1 : path;
  return std::strcmp(name, "libc10.so") == 0 || std::strcmp(name, "libtorch_cpu.so") == 0;
}

bool is_slot(ElfW(Xword) info) {
#if defined(__x86_64__)
  return ELF64_R_TYPE(info) == R_X86_64_JUMP_SLOT || ELF64_R_TYPE(info) == R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
  return ELF64_R_TYPE(info) == R_AARCH64_JUMP_SLOT || ELF64_R_TYPE(info) == R_AARCH64_GLOB_DAT;
#else
  (void)info;
  return false;
#endif
}

// Sets a slot, whose page the loader may have made read-only once it was filled (RELRO).
bool set(void** slot, void* function, bool is_read_only) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* first = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / page * page);
  if (is_read_only && mprotect(first, page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, function, __ATOMIC_RELEASE);
  if (is_read_only) mprotect(first, page, PROT_READ);
  return true;
}

// Replaces the slots of posix_memalign in one loaded library of torch's; adds to *count how many.
int replace(dl_phdr_info* info, size_t, void* count) {
  if (!info->dlpi_name || !is_torch(info->dlpi_name)) return 0;
  const ElfW(Dyn)* dynamic = nullptr;
  uintptr_t relro = 0, relro_end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) {
      relro = info->dlpi_addr + header.p_vaddr;
      relro_end = relro + header.p_memsz;
    }
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  struct {
    const ElfW(Rela)* first;
    size_t n_bytes;
  } tables[2] = {{nullptr, 0}, {nullptr, 0}};
  for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
    const uintptr_t value = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym)*>(value); break;
      case DT_STRTAB: names = reinterpret_cast<const char*>(value); break;
      case DT_RELA: tables[0].first = reinterpret_cast<const ElfW(Rela)*>(value); break;
      case DT_RELASZ: tables[0].n_bytes = value; break;
      case DT_JMPREL: tables[1].first = reinterpret_cast<const ElfW(Rela)*>(value); break;
      case DT_PLTRELSZ: tables[1].n_bytes = value; break;
      default: break;
    }
  }
  for (const auto& table : tables) {
    for (size_t i = 0; table.first && symbols && names && i < table.n_bytes / sizeof(ElfW(Rela)); ++i) {
      const auto& one = table.first[i];
      if (!is_slot(one.r_info) || std::strcmp(names + symbols[ELF64_R_SYM(one.r_info)].st_name, "posix_memalign") != 0)
        continue;
      auto* slot = reinterpret_cast<void**>(info->dlpi_addr + one.r_offset);
      const uintptr_t at = reinterpret_cast<uintptr_t>(slot);
      *static_cast<int*>(count) += set(slot, reinterpret_cast<void*>(&posix_memalign_again), at >= relro && at < relro_end);
    }
  }
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int whet_fill_gaps() {
  int count = 0;
  dl_iterate_phdr(&replace, &count);
  return count;
}
#else
extern "C" __attribute__((visibility("default"))) int whet_fill_gaps() { return 0; }
#endif
