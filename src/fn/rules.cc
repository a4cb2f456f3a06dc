// SPDX-License-Identifier: Apache-2.0
#include "fn/rules.h"

#include <algorithm>
#include <set>
#include <vector>

#include "base/id.h"
#include "base/utf8.h"
#include "fn/digest.h"
#include "fn/gpu.h"
#include "model/spec.h"

namespace dsec::fn {
namespace {

constexpr size_t kMaxName = 63;
constexpr size_t kMaxComponent = 255;  // NAME_MAX
constexpr size_t kMaxAliases = 32;
constexpr size_t kMaxDescription = 1024;
constexpr size_t kMaxArgv = 1024;
constexpr size_t kMaxToolkits = 64;
constexpr size_t kMaxImports = 256;
constexpr size_t kMaxOwner = 256;  // principal, project
constexpr uint32_t kMaxPool = 4096;
constexpr uint64_t kMaxIdleMs = 30ull * 86'400'000;

using Strings = google::protobuf::RepeatedPtrField<std::string>;

bool IsLowerAlnum(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

bool IsText(std::string_view text) {
  return IsUtf8(text) && std::none_of(text.begin(), text.end(), [](char c) {
           return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
         });
}

std::string Item(std::string_view field, int index) { return fmt::format("{}[{}]", field, index); }

Result<void> CheckCount(size_t count, size_t max, std::string_view field) {
  if (count > max) return Invalid(field, "{} items are more than {}", count, max);
  return Ok();
}

Result<void> CheckWord(std::string_view word, std::string_view field) {
  if (word.find('\0') != std::string_view::npos) return Invalid(field, "contains a NUL byte");
  if (word.size() >= model::kMaxArgString) {
    return Invalid(field, "{} bytes are more than {}", word.size(), model::kMaxArgString - 1);
  }
  return Ok();
}

Result<void> CheckEnvironment(const v1::FnEnvironment& environment, std::string_view field) {
  if (environment.base().empty()) return Invalid(fmt::format("{}.base", field), "is required");
  return CheckCount(static_cast<size_t>(environment.toolkits_size()), kMaxToolkits,
                    fmt::format("{}.toolkits", field));
}

// No path twice, none that is a folder of another.
Result<void> CheckDisjoint(const std::set<std::string, std::less<>>& paths,
                           std::string_view field) {
  for (const std::string& path : paths) {
    for (size_t slash = path.find('/'); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      if (paths.contains(std::string_view(path).substr(0, slash))) {
        return Invalid(field, "{} is a file and the folder of {}",
                       model::Quoted(path.substr(0, slash)), model::Quoted(path));
      }
    }
  }
  return Ok();
}

// The words of a command. `allowed`: which of the two placeholders may be there.
Result<void> CheckArgv(const Strings& argv, bool source, bool args, std::string_view field) {
  DSEC_TRY_VOID(CheckCount(static_cast<size_t>(argv.size()), kMaxArgv, field));
  int args_words = 0;
  for (int i = 0; i < argv.size(); ++i) {
    DSEC_TRY_VOID(CheckWord(argv[i], Item(field, i)));
    if (argv[i] == kSourceWord && !source) {
      return Invalid(Item(field, i), "{} needs the field source", kSourceWord);
    }
    if (argv[i] != kArgsWord) continue;
    if (!args) return Invalid(Item(field, i), "{} has no place here", kArgsWord);
    if (++args_words > 1) return Invalid(Item(field, i), "{} is there twice", kArgsWord);
  }
  // A program that is searched for could not be told from one that a call brings along.
  if (!argv.empty() && !argv[0].starts_with('/') && !argv[0].starts_with("./")) {
    return Invalid(Item(field, 0), "{} must begin with / or ./", model::Quoted(argv[0]));
  }
  return Ok();
}

Result<void> CheckCommand(const v1::FnCommand& command, const v1::FnTaskType& type, bool args,
                          const NormalizeLimits& normalize, const std::string& field) {
  DSEC_TRY_VOID(CheckArgv(command.argv(), !type.source().empty(), args, field + ".argv"));
  DSEC_TRY_VOID(model::CheckEnv(command.env(), field + ".env"));
  // A type is kept as JSON.
  for (int i = 0; i < command.argv_size(); ++i) {
    if (!IsUtf8(command.argv(i))) return Invalid(Item(field + ".argv", i), "is not UTF-8");
  }
  for (const v1::KeyValue& pair : command.env()) {
    if (!IsUtf8(pair.value())) return Invalid(field + ".env", "{} is not UTF-8", pair.key());
  }
  DSEC_TRY_VOID(normalize(command.limits(), field + ".limits"));
  return Ok();
}

Result<void> CheckWarm(const v1::FnWarm& warm) {
  if (warm.kind().empty()) {
    if (warm.argv_size() != 0 || warm.imports_size() != 0) {
      return Invalid("warm.kind", "is required when warm has other fields");
    }
    return Ok();
  }
  if (warm.kind() != "python") {
    return Invalid("warm.kind", "{} is not python", model::Quoted(warm.kind()));
  }
  if (warm.argv_size() == 0) return Invalid("warm.argv", "is required");
  DSEC_TRY_VOID(CheckArgv(warm.argv(), false, false, "warm.argv"));
  if (!warm.argv(0).starts_with('/')) {
    return Invalid("warm.argv[0]", "{} is not an absolute path", model::Quoted(warm.argv(0)));
  }
  DSEC_TRY_VOID(CheckCount(static_cast<size_t>(warm.imports_size()), kMaxImports, "warm.imports"));
  for (int i = 0; i < warm.imports_size(); ++i) {
    // Dotted identifiers in ASCII: nothing else may become part of a program text.
    const std::string& name = warm.imports(i);
    bool start = true;
    bool good = !name.empty() && name.size() <= kMaxComponent;
    for (const char c : name) {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
      const bool digit = c >= '0' && c <= '9';
      good = good && (letter || (!start && (digit || c == '.')));
      start = c == '.';
    }
    if (!good || start) {
      return Invalid(Item("warm.imports", i), "{} is not the name of a module",
                     model::Quoted(name));
    }
  }
  return Ok();
}

Result<void> CheckFiles(const v1::FnCall& call, const v1::FnTaskType& type, size_t* bytes) {
  DSEC_TRY_VOID(CheckCount(static_cast<size_t>(call.files_size()), kMaxFiles, "files"));
  std::set<std::string, std::less<>> paths;
  if (!type.source().empty()) paths.insert(type.source());
  for (int i = 0; i < call.files_size(); ++i) {
    const v1::FnFile& file = call.files(i);
    const std::string field = Item("files", i);
    DSEC_TRY_VOID(CheckRelativePath(file.path(), field + ".path"));
    if (!paths.insert(file.path()).second) {
      return Invalid(field + ".path", "{} is there twice{}", model::Quoted(file.path()),
                     file.path() == type.source() ? ": the code goes there" : "");
    }
    if (!file.artifact().empty()) {
      if (!file.content().empty()) {
        return Invalid(field, "content and artifact exclude one another");
      }
      if (!IsArtifactDigest(file.artifact())) {
        return Invalid(field + ".artifact", "{} is not sha256: and 64 lower-case hex digits",
                       model::Quoted(file.artifact()));
      }
    }
    if (file.mode() > 0777) {
      return Invalid(field + ".mode", "{:#o} has other bits than those of 0777", file.mode());
    }
    *bytes += file.content().size();
  }
  return CheckDisjoint(paths, "files");
}

Result<void> CheckGpu(const v1::FnGpuRequest& gpu) {
  if (gpu.count() == 0) {
    if (!gpu.kind().empty() || gpu.shared()) {
      return Invalid("gpu.count", "is required when gpu has other fields");
    }
    return Ok();
  }
  if (gpu.count() > kMaxGpus) {
    return Invalid("gpu.count", "{} is more than {}", gpu.count(), kMaxGpus);
  }
  if (!gpu.kind().empty() && !IsGpuKind(gpu.kind())) {
    return Invalid("gpu.kind", "{} is neither whole nor a MIG profile such as 1g.10gb",
                   model::Quoted(gpu.kind()));
  }
  return Ok();
}

}  // namespace

Result<void> CheckTypeName(std::string_view name, std::string_view field) {
  const bool good =
      !name.empty() && name.size() <= kMaxName && IsLowerAlnum(name[0]) &&
      std::all_of(name.begin(), name.end(), [](char c) {
        return IsLowerAlnum(c) || std::string_view("_+.-").find(c) != std::string_view::npos;
      });
  if (good) return Ok();
  return Invalid(field, "{} is not 1 to {} of [a-z0-9_+.-] with a letter or digit first",
                 model::Quoted(name), kMaxName);
}

Result<void> CheckRelativePath(std::string_view path, std::string_view field) {
  if (path.size() > model::kMaxPathBytes) {
    return Invalid(field, "{} bytes are more than {}", path.size(), model::kMaxPathBytes);
  }
  if (path.find('\0') != std::string_view::npos) return Invalid(field, "contains a NUL byte");
  std::string_view rest = path;
  while (true) {
    const std::string_view component = rest.substr(0, rest.find('/'));
    if (component.empty() || component == "." || component == "..") {
      return Invalid(field, "{} is not a relative path without empty, . and .. components",
                     model::Quoted(path));
    }
    if (component.size() > kMaxComponent) {
      return Invalid(field, "{} has a component of more than {} bytes", model::Quoted(path),
                     kMaxComponent);
    }
    if (component.size() == rest.size()) return Ok();
    rest.remove_prefix(component.size() + 1);
  }
}

Result<void> CheckTaskType(const v1::FnTaskType& type, const NormalizeLimits& normalize) {
  DSEC_TRY_VOID(CheckTypeName(type.name(), "name"));
  DSEC_TRY_VOID(CheckCount(static_cast<size_t>(type.aliases_size()), kMaxAliases, "aliases"));
  std::set<std::string, std::less<>> names = {type.name()};
  for (int i = 0; i < type.aliases_size(); ++i) {
    DSEC_TRY_VOID(CheckTypeName(type.aliases(i), Item("aliases", i)));
    if (!names.insert(type.aliases(i)).second) {
      return Invalid(Item("aliases", i), "{} is there twice", model::Quoted(type.aliases(i)));
    }
  }
  if (type.description().size() > kMaxDescription || !IsText(type.description())) {
    return Invalid("description", "is not at most {} bytes of UTF-8 without control characters",
                   kMaxDescription);
  }
  DSEC_TRY_VOID(CheckEnvironment(type.environment(), "environment"));
  if (!type.source().empty()) DSEC_TRY_VOID(CheckRelativePath(type.source(), "source"));
  DSEC_TRY_VOID(CheckCommand(type.compile(), type, false, normalize, "compile"));
  if (type.compile().argv().empty() && type.compile().artifacts_size() != 0) {
    return Invalid("compile.artifacts", "has no compile.argv that makes them");
  }
  for (int i = 0; i < type.compile().artifacts_size(); ++i) {
    DSEC_TRY_VOID(CheckRelativePath(type.compile().artifacts(i), Item("compile.artifacts", i)));
  }
  if (type.run().argv().empty()) return Invalid("run.argv", "is required");
  DSEC_TRY_VOID(CheckCommand(type.run(), type, true, normalize, "run"));
  if (type.run().artifacts_size() != 0) {
    return Invalid("run.artifacts", "belongs to compile alone");
  }
  const v1::FnPoolSize& pool = type.pool();
  if (pool.min() > kMaxPool) return Invalid("pool.min", "{} is above {}", pool.min(), kMaxPool);
  if (pool.max() > kMaxPool) return Invalid("pool.max", "{} is above {}", pool.max(), kMaxPool);
  if (pool.max() != 0 && pool.min() > pool.max()) {
    return Invalid("pool.min", "{} is above pool.max {}", pool.min(), pool.max());
  }
  if (pool.idle_ms() > kMaxIdleMs) {
    return Invalid("pool.idle_ms", "{} is above {}", pool.idle_ms(), kMaxIdleMs);
  }
  return CheckWarm(type.warm());
}

Result<void> CheckCall(const v1::FnCall& call, const v1::FnTaskType& type) {
  if (!call.op_id().empty()) DSEC_TRY_VOID(ParseOpId(call.op_id(), "op_id"));
  if (type.source().empty() && !call.code().empty()) {
    return Invalid("code", "the type {} takes no code; give files", type.name());
  }
  size_t bytes = call.code().size() + call.stdin().size();
  DSEC_TRY_VOID(CheckFiles(call, type, &bytes));
  if (bytes > kMaxInputBytes) {
    return Error(Code::kPayloadTooLarge, "fn.too_large",
                 fmt::format("files: code, files and stdin have {} bytes, more than {}", bytes,
                             kMaxInputBytes))
        .WithField("files");
  }
  DSEC_TRY_VOID(CheckCount(static_cast<size_t>(call.args_size()), kMaxArgs, "args"));
  size_t arg_bytes = 0;
  for (int i = 0; i < call.args_size(); ++i) {
    DSEC_TRY_VOID(CheckWord(call.args(i), Item("args", i)));
    arg_bytes += call.args(i).size() + 1;
  }
  if (arg_bytes > kMaxArgBytes) {
    return Invalid("args", "{} bytes are more than {}", arg_bytes, kMaxArgBytes);
  }
  const auto& words = type.run().argv();
  if (call.args_size() != 0 && std::find(words.begin(), words.end(), kArgsWord) == words.end()) {
    return Invalid("args", "the command of the type {} has no {}", type.name(), kArgsWord);
  }
  DSEC_TRY_VOID(CheckCount(static_cast<size_t>(call.fetch_size()), kMaxFetch, "fetch"));
  for (int i = 0; i < call.fetch_size(); ++i) {
    std::string_view path = call.fetch(i);
    if (path.ends_with('/')) path.remove_suffix(1);
    DSEC_TRY_VOID(CheckRelativePath(path, Item("fetch", i)));
    if (path == "*") return Invalid(Item("fetch", i), "there are no patterns");
  }
  DSEC_TRY_VOID(model::CheckEnv(call.env(), "env"));
  DSEC_TRY_VOID(CheckGpu(call.gpu()));
  if (call.has_environment()) {
    DSEC_TRY_VOID(CheckEnvironment(call.environment(), "environment"));
  }
  if (call.compile_only()) {
    if (type.compile().argv().empty()) {
      return Invalid("compile_only", "the type {} compiles nothing", type.name());
    }
    if (call.fetch_size() != 0) {
      return Invalid("fetch", "a call with compile_only brings the artefacts of the compile step");
    }
  }
  if (call.principal().size() > kMaxOwner) {
    return Invalid("principal", "is longer than {} bytes", kMaxOwner);
  }
  if (call.project().size() > kMaxOwner) {
    return Invalid("project", "is longer than {} bytes", kMaxOwner);
  }
  return Ok();
}

v1::FnLimits MergeLimits(const v1::FnLimits& call, const v1::FnLimits& type) {
  // In proto3 a field at 0 is one that is not set: merging takes what the call says.
  v1::FnLimits merged = type;
  merged.MergeFrom(call);
  return merged;
}

}  // namespace dsec::fn
