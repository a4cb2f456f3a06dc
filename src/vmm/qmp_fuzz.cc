// SPDX-License-Identifier: Apache-2.0
// Whatever QEMU says: the parser stays within its bounds.
#include <cstdint>

#include "vmm/boot_config.h"
#include "vmm/keeper.h"
#include "vmm/port_sync.h"
#include "vmm/qmp.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  dsec::vmm::QmpParser parser;
  // In two parts, so that messages cross their border.
  const size_t half = size / 2;
  for (const std::string_view part : {bytes.substr(0, half), bytes.substr(half)}) {
    parser.Feed(part);
    while (true) {
      auto message = parser.Next();
      if (!message.ok() || !message->has_value()) break;
    }
  }
  dsec::vmm::PortSync sync("0123456789abcdef");
  auto step = sync.Look(bytes);
  if (step.ok() && step->take > size) __builtin_trap();
  static_cast<void>(dsec::vmm::ParseConsole(bytes));
  static_cast<void>(dsec::vmm::ParseExit(bytes));
  std::string config(bytes);
  config.resize(dsec::vmm::kBootConfigBytes, '\0');
  const auto parsed = dsec::vmm::BootConfig::Parse(config);
  if (parsed.ok() && parsed->Encode() != config) __builtin_trap();
  return 0;
}
