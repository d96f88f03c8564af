// How a program starts. Since glibc 2.34 the C library itself calls the constructors of the program; before, what is
// linked into each program gave it a function for that. It takes such a function still. The linker has --wrap.
namespace {

using Main = int(int, char**, char**);
using Initialize = void(int, char**, char**);

}  // namespace

extern "C" {

// Defined by the linker, and by the compiler's crti.o.
extern Initialize* __init_array_start[];  // NOLINT
extern Initialize* __init_array_end[];    // NOLINT
void _init();                             // NOLINT

int __real___libc_start_main(Main* main, int argc, char** argv, Initialize* initialize, void (*finish)(),  // NOLINT
                             void (*finish_loader)(), void* stack_end);

static void call_constructors(int argc, char** argv, char** environment) {
  _init();
  for (Initialize** constructor = __init_array_start; constructor != __init_array_end; ++constructor) {
    (*constructor)(argc, argv, environment);
  }
}

// The loader calls the destructors, with `finish_loader`.
int __wrap___libc_start_main(Main* main, int argc, char** argv, Initialize*, void (*)(),  // NOLINT
                             void (*finish_loader)(), void* stack_end) {
  return __real___libc_start_main(main, argc, argv, call_constructors, nullptr, finish_loader, stack_end);
}

}  // extern "C"
