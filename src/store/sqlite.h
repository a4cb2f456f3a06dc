// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

struct sqlite3;
struct sqlite3_stmt;

namespace dsec::store {

// A prepared statement, bound, stepped and reset by hand. Not thread-safe; must not outlive its
// Database. Texts and blobs are bound without a copy: they must live until Reset, and what a column
// returns until the next Step or Reset.
class Statement {
 public:
  Statement() = default;

  Statement& Bind(int index, int64_t value);
  Statement& Bind(int index, std::string_view text);
  Statement& BindBlob(int index, std::string_view bytes);

  // True while there is a row. After false or an error the statement is reset.
  Result<bool> Step();
  // For statements without rows.
  Result<void> Run();
  void Reset();

  int64_t Int(int column) const;
  std::string_view Text(int column) const;
  std::string_view Blob(int column) const;

 private:
  friend class Database;
  struct Finalize {
    void operator()(sqlite3_stmt* statement) const;
  };
  explicit Statement(sqlite3_stmt* statement) : statement_(statement) {}

  std::unique_ptr<sqlite3_stmt, Finalize> statement_;
};

// One SQLite connection that owns its file alone (locking_mode=EXCLUSIVE), in WAL mode with
// synchronous=OFF: a commit survives the death of this process at any instruction, not a crash of
// the host. Not thread-safe.
//
// Errors: kUnavailable store.busy (another process has it), store.full, store.io; kInternal
// store.corrupt (the file is not what we wrote), store.failed; kAlreadyExists store.constraint.
class Database {
 public:
  // Makes the file (mode 0600) when there is none.
  static Result<Database> Open(const std::string& path);

  // Any number of statements without parameters and rows.
  Result<void> Execute(const char* sql);
  Result<Statement> Prepare(std::string_view sql);
  // Rows changed by the last statement.
  int64_t Changes() const;

 private:
  struct Close {
    void operator()(sqlite3* connection) const;
  };
  explicit Database(sqlite3* connection) : connection_(connection) {}

  std::unique_ptr<sqlite3, Close> connection_;
};

// BEGIN IMMEDIATE on construction, ROLLBACK on destruction unless Commit succeeded.
class Transaction {
 public:
  static Result<Transaction> Begin(Database& database);
  Transaction(Transaction&& other) noexcept : database_(std::exchange(other.database_, nullptr)) {}
  Transaction& operator=(Transaction&&) = delete;
  ~Transaction();
  Result<void> Commit();

 private:
  explicit Transaction(Database& database) : database_(&database) {}

  Database* database_;
};

}  // namespace dsec::store
