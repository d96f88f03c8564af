// A libibverbs under another name, without devices.
#include <infiniband/verbs.h>

#undef ibv_get_device_list

#define BUNDLED_EXPORT extern "C" __attribute__((visibility("default")))

BUNDLED_EXPORT ibv_device** ibv_get_device_list(int* count) {
  *count = 0;
  return nullptr;
}

BUNDLED_EXPORT const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}
