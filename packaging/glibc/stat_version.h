// What glibc's functions for the state of a file take first: the version of struct stat.
//
// Source: glibc 2.32's <sys/stat.h> and <bits/stat.h>.
#pragma once

struct stat64;

#ifdef __x86_64__
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
