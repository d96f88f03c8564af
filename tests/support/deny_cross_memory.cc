//: program deny_cross_memory

// usage: deny_cross_memory COMMAND [ARGUMENT...]
// Runs COMMAND under a seccomp filter that makes process_vm_readv and process_vm_writev fail with EPERM, as in
// containers.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>

int main(int argc, char** argv) {
  sock_filter program[] = {
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, SYS_process_vm_readv},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_process_vm_writev},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  };
  const sock_fprog filter{sizeof program / sizeof *program, program};
  if (argc < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    std::perror("deny_cross_memory");
    return 77;  // skipped
  }
  execv(argv[1], argv + 1);
  std::perror(argv[1]);
  return 1;
}
