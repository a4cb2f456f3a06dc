// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dsec::sandbox {

// What decides how the machine looks from inside.
struct ViewShape {
  uint64_t cpu_millis = 1000;
  uint64_t memory_bytes = 0;
  auto operator<=>(const ViewShape&) const = default;
};

// What is taken from the host, read once.
struct HostFacts {
  std::string cpuinfo;  // /proc/cpuinfo
  std::string stat;     // /proc/stat, for its btime
  std::string
      thp_enabled;  // /sys/kernel/mm/transparent_hugepage/enabled; empty: the kernel has none
  std::string thp_pmd_size;  // .../hpage_pmd_size
};

struct ViewFile {
  std::string path;  // relative; parents are implied
  std::string content;
};

// The views are static: they show the limits of the sandbox, not its load. Pure.
//
// Below "proc/": cpuinfo, meminfo, stat, loadavg. Below "sys/": cores, one NUMA node, transparent
// huge pages, and the limits as the files of a cgroup v2 root. The visible cores are the limit
// rounded up and are numbered from 0.
std::vector<ViewFile> MakeViews(const ViewShape& shape, const HostFacts& host);

std::string CpuInfoView(std::string_view host_cpuinfo, uint64_t cores);
std::string MemInfoView(uint64_t memory_bytes);
std::string StatView(std::string_view host_stat, uint64_t cores);

}  // namespace dsec::sandbox
