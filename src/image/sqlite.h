// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

// The databases of a layer store: SQLite with a rollback journal, which any file system with POSIX
// locks can hold. One that waits longer than 10 s for another process gets kUnavailable
// "layer.catalog_busy", other failures are kResourceExhausted "layer.no_space", kInternal
// "layer.catalog_damaged" for a file that is none or is inconsistent, and kInternal
// "layer.catalog".
namespace dsec::image::sql {

// Opens or makes the file. `db` is to be closed (sqlite3_close_v2) in any case.
Result<void> Open(const std::string& path, sqlite3** db);
Error Fail(sqlite3* db, std::string_view what);
Result<void> Execute(sqlite3* db, const char* sql);

// One prepared statement, bound by position. A failed bind shows at Step.
class Statement {
 public:
  Statement(sqlite3* db, std::string_view sql);
  ~Statement() { ::sqlite3_finalize(handle_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Text(std::string_view text);
  Statement& Number(uint64_t number);
  Statement& Bytes(std::span<const uint8_t> bytes);

  // True while there is a row.
  Result<bool> Step();
  Result<void> Run();
  // From the start once more.
  Result<bool> Again();
  // Lets go of the locks that a statement under way holds; the next values are bound from the
  // first.
  void Rewind();

  std::string TextAt(int column) const;
  uint64_t NumberAt(int column) const;
  std::span<const uint8_t> BytesAt(int column) const;  // until the next Step

 private:
  void Keep(int status) {
    if (status_ == SQLITE_OK) status_ = status;
  }
  sqlite3* db_;
  sqlite3_stmt* handle_ = nullptr;
  int status_;
  int bound_ = 0;
};

// Rolls back unless committed.
class Transaction {
 public:
  explicit Transaction(sqlite3* db) : db_(db) {}
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  Result<void> Begin();
  Result<void> Commit();

 private:
  sqlite3* db_;
  bool open_ = false;
};

}  // namespace dsec::image::sql
