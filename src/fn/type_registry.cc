// SPDX-License-Identifier: Apache-2.0
#include "fn/type_registry.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "base/log.h"
#include "fn/task_type.h"
#include "os/file.h"

namespace dsec::fn {
namespace {

namespace stdfs = std::filesystem;

constexpr std::string_view kSuffix = ".json";

// Whole or not at all, also after a crash of the host.
Result<void> ReplaceFile(const std::string& dir, const std::string& name, std::string_view bytes) {
  DSEC_TRY(const os::UniqueFd folder, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
  const std::string partial = "." + name + ".new";
  DSEC_TRY(const os::UniqueFd file, os::OpenAt(folder.get(), partial.c_str(),
                                               O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0644));
  DSEC_TRY_VOID(os::WriteAll(file.get(), bytes));
  if (fsync(file.get()) != 0) return os::ErrnoError("fn.types_dir", partial);
  if (renameat(folder.get(), partial.c_str(), folder.get(), name.c_str()) != 0 ||
      fsync(folder.get()) != 0) {
    return os::ErrnoError("fn.types_dir", fmt::format("{}/{}", dir, name));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<TypeRegistry>> TypeRegistry::Open(const std::vector<std::string>& dirs,
                                                         std::string put_dir,
                                                         NormalizeLimits normalize) {
  std::error_code error;
  stdfs::create_directories(put_dir, error);
  if (error) {
    return Error(Code::kInternal, "fn.types_dir", fmt::format("{}: {}", put_dir, error.message()));
  }
  std::unique_ptr<TypeRegistry> registry(
      new TypeRegistry(std::move(put_dir), std::move(normalize)));
  for (const std::string& dir : dirs) registry->LoadDir(dir, false);
  registry->LoadDir(registry->put_dir_, true);
  return registry;
}

void TypeRegistry::LoadDir(const std::string& dir, bool put) {
  std::vector<std::string> files;
  std::error_code error;
  for (stdfs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(kSuffix) && !name.starts_with('.')) files.push_back(it->path().string());
  }
  if (error) {
    AddFault(dir, Error(Code::kNotFound, "fn.types_dir", error.message()));
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    if (auto loaded = LoadFile(file, put); !loaded.ok()) AddFault(file, loaded.error());
  }
}

Result<void> TypeRegistry::LoadFile(const std::string& path, bool put) {
  DSEC_TRY(const std::string text, os::ReadFile(AT_FDCWD, path.c_str(), kMaxTypeBytes));
  DSEC_TRY(v1::FnTaskType type, ParseTaskType(text));
  DSEC_TRY_VOID(CheckTaskType(type, normalize_));
  const std::string stem = stdfs::path(path).stem().string();
  if (stem != type.name()) {
    return Invalid("name", "{} is not the name of the file, {}", type.name(), stem);
  }
  if (!put && of_node_.contains(type.name())) {
    return Error(Code::kAlreadyExists, "fn.type_name_taken",
                 fmt::format("name: {} was read from another folder", type.name()))
        .WithField("name");
  }
  DSEC_TRY_VOID(CheckNames(type));
  Types& types = put ? put_ : of_node_;
  std::string name = type.name();
  types[std::move(name)] = std::make_shared<const v1::FnTaskType>(std::move(type));
  Index();
  return {};
}

void TypeRegistry::AddFault(std::string file, const Error& error) {
  log::Error("fn.type_not_loaded", {{"file", file}, {"error", error}});
  faults_.push_back({std::move(file), error.ToString()});
}

TypeRegistry::Types TypeRegistry::Effective() const {
  Types types = put_;
  types.insert(of_node_.begin(), of_node_.end());
  return types;
}

void TypeRegistry::Index() {
  by_name_ = Effective();
  // A name stands before an alias: a type that is there again may have lost one.
  const Types types = by_name_;
  for (const auto& [name, type] : types) {
    for (const std::string& alias : type->aliases()) by_name_.emplace(alias, type);
  }
}

TypeRegistry::TypePtr TypeRegistry::Holding(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

Result<void> TypeRegistry::CheckNames(const v1::FnTaskType& type) const {
  const auto check = [&](const std::string& name, const std::string& field) -> Result<void> {
    const TypePtr other = Holding(name);
    if (other == nullptr || other->name() == type.name()) return {};
    return Error(Code::kAlreadyExists, "fn.type_name_taken",
                 fmt::format("{}: {} is a name of the type {}", field, name, other->name()))
        .WithField(field);
  };
  DSEC_TRY_VOID(check(type.name(), "name"));
  for (int i = 0; i < type.aliases_size(); ++i) {
    DSEC_TRY_VOID(check(type.aliases(i), fmt::format("aliases[{}]", i)));
  }
  return {};
}

Result<TypeRegistry::TypePtr> TypeRegistry::Find(std::string_view name) const {
  // Too long a name is not looked for, nor repeated in a message.
  DSEC_TRY_VOID(CheckTypeName(name, "type"));
  const std::lock_guard lock(mutex_);
  if (TypePtr type = Holding(name); type != nullptr) return type;
  return Error(Code::kNotFound, "fn.type_not_found",
               fmt::format("type: there is no task type {}", name))
      .WithField("type");
}

std::vector<v1::FnTaskType> TypeRegistry::List() const {
  std::vector<v1::FnTaskType> list;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, type] : Effective()) list.push_back(*type);
  return list;
}

Result<void> TypeRegistry::Put(const v1::FnTaskType& type) {
  DSEC_TRY_VOID(CheckTaskType(type, normalize_));
  const std::lock_guard writing(writing_);
  {
    const std::lock_guard lock(mutex_);
    DSEC_TRY_VOID(CheckNames(type));
  }
  const std::string file = type.name() + std::string(kSuffix);
  DSEC_TRY_VOID(ReplaceFile(put_dir_, file, FormatTaskType(type)));
  const std::lock_guard lock(mutex_);
  put_[type.name()] = std::make_shared<const v1::FnTaskType>(type);
  Index();
  std::erase_if(faults_, [&](const Fault& fault) { return fault.file == put_dir_ + "/" + file; });
  return {};
}

Result<void> TypeRegistry::Remove(std::string_view name) {
  DSEC_TRY_VOID(CheckTypeName(name, "type"));
  const std::lock_guard writing(writing_);
  {
    const std::lock_guard lock(mutex_);
    if (!put_.contains(name)) {
      if (of_node_.contains(name)) {
        return Error(Code::kConflict, "fn.type_of_node",
                     fmt::format("type: {} comes from a folder of the node; a type of that name "
                                 "that is put stands before it",
                                 name))
            .WithField("type");
      }
      return Error(Code::kNotFound, "fn.type_not_found",
                   fmt::format("type: there is no task type {}", name))
          .WithField("type");
    }
  }
  const std::string path = fmt::format("{}/{}{}", put_dir_, name, kSuffix);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return os::ErrnoError("fn.types_dir", path);
  const std::lock_guard lock(mutex_);
  put_.erase(put_.find(name));
  Index();
  return {};
}

std::vector<TypeRegistry::Fault> TypeRegistry::Faults() const {
  const std::lock_guard lock(mutex_);
  return faults_;
}

}  // namespace dsec::fn
