// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/view_content.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"

namespace dsec::sandbox {
namespace {

std::string_view TakeLine(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

std::string List(uint64_t cores) { return cores == 1 ? "0\n" : fmt::format("0-{}\n", cores - 1); }

// As the kernel prints a cpumask: hexadecimal words of 32 cores, the highest first.
std::string Mask(uint64_t cores) {
  std::string text;
  for (uint64_t word = (cores + 31) / 32; word-- > 0;) {
    const uint64_t bits = std::min<uint64_t>(cores - word * 32, 32);
    text += fmt::format("{:08x}{}", bits == 32 ? 0xffffffffull : (1ull << bits) - 1,
                        word == 0 ? "" : ",");
  }
  return text + "\n";
}

void AddCores(std::vector<ViewFile>& files, uint64_t cores) {
  const std::string cpu = "sys/devices/system/cpu/";
  for (const char* name : {"online", "possible", "present"})
    files.push_back({cpu + name, List(cores)});
  files.push_back({cpu + "offline", "\n"});
  files.push_back({cpu + "kernel_max", fmt::format("{}\n", cores - 1)});
  for (uint64_t i = 0; i < cores; ++i) {
    const std::string core = fmt::format("{}cpu{}/", cpu, i);
    if (i > 0) files.push_back({core + "online", "1\n"});
    files.push_back({core + "topology/core_id", fmt::format("{}\n", i)});
    files.push_back({core + "topology/physical_package_id", "0\n"});
    files.push_back({core + "topology/thread_siblings_list", fmt::format("{}\n", i)});
    files.push_back({core + "topology/core_siblings_list", List(cores)});
  }
}

void AddNode(std::vector<ViewFile>& files, const ViewShape& shape, uint64_t cores) {
  const std::string node = "sys/devices/system/node/";
  for (const char* name : {"online", "possible", "has_cpu", "has_memory", "has_normal_memory"}) {
    files.push_back({node + name, "0\n"});
  }
  files.push_back({node + "node0/cpulist", List(cores)});
  files.push_back({node + "node0/cpumap", Mask(cores)});
  files.push_back({node + "node0/distance", "10\n"});
  const uint64_t kib = shape.memory_bytes / 1024;
  files.push_back({node + "node0/meminfo",
                   fmt::format("Node 0 MemTotal:       {0:8} kB\nNode 0 MemFree:        {0:8} kB\n"
                               "Node 0 MemUsed:        {1:8} kB\n",
                               kib, 0)});
}

}  // namespace

std::string CpuInfoView(std::string_view host_cpuinfo, uint64_t cores) {
  // The first core's block, as the pattern of each: the host's other cores may differ in what must
  // not be seen.
  std::vector<std::string_view> block;
  while (!host_cpuinfo.empty()) {
    const std::string_view line = TakeLine(host_cpuinfo);
    if (line.find_first_not_of(" \t") == std::string_view::npos) {
      if (!block.empty()) break;
      continue;
    }
    block.push_back(line);
  }
  std::string text;
  for (uint64_t i = 0; i < cores; ++i) {
    for (const std::string_view line : block) {
      const std::string_view key = line.substr(0, line.find_first_of("\t:"));
      const std::string_view head = line.substr(0, std::min(line.find(':'), line.size()));
      if (key == "processor" || key == "core id" || key == "apicid" || key == "initial apicid") {
        text += fmt::format("{}: {}\n", head, i);
      } else if (key == "siblings" || key == "cpu cores") {
        text += fmt::format("{}: {}\n", head, cores);
      } else if (key == "physical id") {
        text += fmt::format("{}: 0\n", head);
      } else {
        text += line;
        text += '\n';
      }
    }
    text += '\n';
  }
  return text;
}

std::string MemInfoView(uint64_t memory_bytes) {
  const uint64_t total = memory_bytes / 1024;
  struct Row {
    const char* name;
    uint64_t kib;
  };
  std::string text;
  for (const Row& row :
       {Row{"MemTotal:", total}, {"MemFree:", total},  {"MemAvailable:", total},
        {"Buffers:", 0},         {"Cached:", 0},       {"SwapCached:", 0},
        {"Active:", 0},          {"Inactive:", 0},     {"Active(anon):", 0},
        {"Inactive(anon):", 0},  {"Active(file):", 0}, {"Inactive(file):", 0},
        {"Unevictable:", 0},     {"Mlocked:", 0},      {"SwapTotal:", 0},
        {"SwapFree:", 0},        {"Dirty:", 0},        {"Writeback:", 0},
        {"AnonPages:", 0},       {"Mapped:", 0},       {"Shmem:", 0},
        {"KReclaimable:", 0},    {"Slab:", 0},         {"SReclaimable:", 0},
        {"SUnreclaim:", 0},      {"KernelStack:", 0},  {"PageTables:", 0},
        {"CommitLimit:", total}, {"Committed_AS:", 0}, {"VmallocTotal:", 34359738367},
        {"VmallocUsed:", 0},     {"AnonHugePages:", 0}}) {
    text += fmt::format("{:<15} {:8} kB\n", row.name, row.kib);
  }
  return text + "HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n";
}

std::string StatView(std::string_view host_stat, uint64_t cores) {
  std::string_view btime = "btime 0";
  while (!host_stat.empty()) {
    const std::string_view line = TakeLine(host_stat);
    if (line.starts_with("btime ")) btime = line;
  }
  // Idle is not zero, so that nobody divides by the sum of zeros.
  std::string text = fmt::format("cpu  0 0 0 {} 0 0 0 0 0 0\n", cores * 100);
  for (uint64_t i = 0; i < cores; ++i) text += fmt::format("cpu{} 0 0 0 100 0 0 0 0 0 0\n", i);
  return text +
         fmt::format("intr 0\nctxt 0\n{}\nprocesses 1\nprocs_running 1\nprocs_blocked 0\n", btime);
}

std::vector<ViewFile> MakeViews(const ViewShape& shape, const HostFacts& host) {
  const uint64_t cores = MilliCpu(shape.cpu_millis).VisibleCores();
  std::vector<ViewFile> files;
  files.push_back({"proc/cpuinfo", CpuInfoView(host.cpuinfo, cores)});
  files.push_back({"proc/meminfo", MemInfoView(shape.memory_bytes)});
  files.push_back({"proc/stat", StatView(host.stat, cores)});
  files.push_back({"proc/loadavg", "0.00 0.00 0.00 1/1 1\n"});
  AddCores(files, cores);
  AddNode(files, shape, cores);
  if (!host.thp_enabled.empty()) {
    files.push_back({"sys/kernel/mm/transparent_hugepage/enabled", host.thp_enabled});
    files.push_back({"sys/kernel/mm/transparent_hugepage/hpage_pmd_size", host.thp_pmd_size});
  }
  files.push_back({"sys/fs/cgroup/cgroup.controllers", "cpu memory\n"});
  files.push_back({"sys/fs/cgroup/cpu.max", fmt::format("{} 100000\n", shape.cpu_millis * 100)});
  files.push_back({"sys/fs/cgroup/memory.max", fmt::format("{}\n", shape.memory_bytes)});
  files.push_back({"sys/fs/cgroup/memory.swap.max", "0\n"});
  return files;
}

}  // namespace dsec::sandbox
