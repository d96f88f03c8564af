// What glibc has as functions of the library since 2.33. Both names of each are the same on machines of 64 bits. A
// library that replaces them for programs has all six, and then the linker takes none from here.
#include "stat_version.h"

extern "C" {

int __xstat64(int version, const char* path, struct stat64* result);                                 // NOLINT
int __lxstat64(int version, const char* path, struct stat64* result);                                // NOLINT
int __fxstatat64(int version, int directory, const char* path, struct stat64* result, int options);  // NOLINT

int stat64(const char* path, struct stat64* result) {
  return __xstat64(kStatVersion, path, result);
}
int lstat64(const char* path, struct stat64* result) {
  return __lxstat64(kStatVersion, path, result);
}
int fstatat64(int directory, const char* path, struct stat64* result, int options) {
  return __fxstatat64(kStatVersion, directory, path, result, options);
}
int stat(const char*, struct stat64*) __attribute__((alias("stat64")));
int lstat(const char*, struct stat64*) __attribute__((alias("lstat64")));
int fstatat(int, const char*, struct stat64*, int) __attribute__((alias("fstatat64")));

}  // extern "C"
