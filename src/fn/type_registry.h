// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "dsec/v1/fncall.pb.h"
#include "fn/rules.h"

namespace dsec::fn {

// The task types of a node: those of its folders, read once, and those that were put, which stand
// before them and are kept as <put_dir>/<name>.json. Thread-safe; Put and Remove block on the disk.
class TypeRegistry {
 public:
  using TypePtr = std::shared_ptr<const v1::FnTaskType>;
  // A file that holds no type that can be used.
  struct Fault {
    std::string file;
    std::string error;
  };

  // Reads every *.json of `dirs`, in order of name, then of `put_dir`, which is made when it is
  // missing. A file that cannot be used is a Fault and logged; a folder that cannot be read, too.
  static Result<std::unique_ptr<TypeRegistry>> Open(const std::vector<std::string>& dirs,
                                                    std::string put_dir, NormalizeLimits normalize);

  // By name or alias; kNotFound fn.type_not_found.
  Result<TypePtr> Find(std::string_view name) const;
  std::vector<v1::FnTaskType> List() const;  // in order of name
  // kInvalidArgument with the field; kAlreadyExists fn.type_name_taken when another type has one of
  // its names.
  Result<void> Put(const v1::FnTaskType& type);
  // kConflict fn.type_of_node for one of the node's folders. What it stood before is there again.
  Result<void> Remove(std::string_view name);
  std::vector<Fault> Faults() const;

 private:
  using Types = std::map<std::string, TypePtr, std::less<>>;

  TypeRegistry(std::string put_dir, NormalizeLimits normalize)
      : put_dir_(std::move(put_dir)), normalize_(std::move(normalize)) {}
  void LoadDir(const std::string& dir, bool put);
  Result<void> LoadFile(const std::string& path, bool put);
  void AddFault(std::string file, const Error& error);
  Result<void> CheckNames(const v1::FnTaskType& type) const;
  // The type that has a name or alias; null when there is none.
  TypePtr Holding(std::string_view name) const;
  Types Effective() const;  // by name, those that were put before those of the node
  void Index();

  const std::string put_dir_;
  const NormalizeLimits normalize_;
  std::mutex writing_;  // one Put or Remove at a time
  mutable std::mutex mutex_;
  Types of_node_;
  Types put_;
  Types by_name_;  // and by alias
  std::vector<Fault> faults_;
};

}  // namespace dsec::fn
