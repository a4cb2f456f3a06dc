// SPDX-License-Identifier: Apache-2.0
#include "store/sqlite.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace dsec::store {
namespace {

Error FromSqlite(sqlite3* connection, int result) {
  std::string message = fmt::format("sqlite: {} ({})", sqlite3_errmsg(connection), result);
  const int sys_errno = sqlite3_system_errno(connection);
  switch (result & 0xff) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return Error(Code::kUnavailable, "store.busy", std::move(message));
    case SQLITE_FULL:
      return Error(Code::kUnavailable, "store.full", std::move(message)).WithErrno(sys_errno);
    case SQLITE_IOERR:
    case SQLITE_CANTOPEN:
    case SQLITE_READONLY:
    case SQLITE_NOMEM:
      return Error(Code::kUnavailable, "store.io", std::move(message)).WithErrno(sys_errno);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return Error(Code::kInternal, "store.corrupt", std::move(message));
    case SQLITE_CONSTRAINT:
      return Error(Code::kAlreadyExists, "store.constraint", std::move(message));
    default:
      return Error(Code::kInternal, "store.failed", std::move(message));
  }
}

}  // namespace

void Statement::Finalize::operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }

Statement& Statement::Bind(int index, int64_t value) {
  sqlite3_bind_int64(statement_.get(), index, value);
  return *this;
}

Statement& Statement::Bind(int index, std::string_view text) {
  sqlite3_bind_text64(statement_.get(), index, text.data() == nullptr ? "" : text.data(),
                      text.size(), SQLITE_STATIC, SQLITE_UTF8);
  return *this;
}

Statement& Statement::BindBlob(int index, std::string_view bytes) {
  sqlite3_bind_blob64(statement_.get(), index, bytes.data() == nullptr ? "" : bytes.data(),
                      bytes.size(), SQLITE_STATIC);
  return *this;
}

Result<bool> Statement::Step() {
  const int result = sqlite3_step(statement_.get());
  if (result == SQLITE_ROW) return true;
  if (result == SQLITE_DONE) {
    Reset();
    return false;
  }
  Error error = FromSqlite(sqlite3_db_handle(statement_.get()), result);
  Reset();
  return error;
}

Result<void> Statement::Run() {
  DSEC_TRY_VOID(Step());
  Reset();
  return Ok();
}

void Statement::Reset() {
  sqlite3_reset(statement_.get());
  sqlite3_clear_bindings(statement_.get());
}

int64_t Statement::Int(int column) const { return sqlite3_column_int64(statement_.get(), column); }

std::string_view Statement::Text(int column) const { return Blob(column); }

std::string_view Statement::Blob(int column) const {
  const void* data = sqlite3_column_blob(statement_.get(), column);
  const int size = sqlite3_column_bytes(statement_.get(), column);
  return data == nullptr
             ? std::string_view()
             : std::string_view(static_cast<const char*>(data), static_cast<size_t>(size));
}

void Database::Close::operator()(sqlite3* connection) const { sqlite3_close_v2(connection); }

Result<Database> Database::Open(const std::string& path) {
  // SQLite makes files 0644; the records name what runs here, so the file is made first.
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) {
    const int sys_errno = errno;
    return Error(Code::kUnavailable, "store.io", fmt::format("cannot open {}", path))
        .WithErrno(sys_errno);
  }
  close(file);
  sqlite3* raw = nullptr;
  const int result = sqlite3_open_v2(
      path.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_PRIVATECACHE,
      nullptr);
  Database database(raw);
  if (result != SQLITE_OK) return std::move(FromSqlite(raw, result)).Context("open {}", path);
  sqlite3_extended_result_codes(raw, 1);
  // The first write takes the file for as long as the connection lives; without shared memory, so
  // WAL costs no locks.
  DSEC_TRY_VOID(
      database
          .Execute("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"
                   "PRAGMA temp_store=MEMORY; PRAGMA cell_size_check=ON;"
                   "BEGIN EXCLUSIVE; COMMIT")
          .Context("open {}", path));
  return database;
}

Result<void> Database::Execute(const char* sql) {
  const int result = sqlite3_exec(connection_.get(), sql, nullptr, nullptr, nullptr);
  if (result != SQLITE_OK) return FromSqlite(connection_.get(), result);
  return Ok();
}

Result<Statement> Database::Prepare(std::string_view sql) {
  sqlite3_stmt* raw = nullptr;
  const int result = sqlite3_prepare_v3(connection_.get(), sql.data(), static_cast<int>(sql.size()),
                                        SQLITE_PREPARE_PERSISTENT, &raw, nullptr);
  if (result != SQLITE_OK) {
    return std::move(FromSqlite(connection_.get(), result)).Context("prepare \"{}\"", sql);
  }
  return Statement(raw);
}

int64_t Database::Changes() const { return sqlite3_changes64(connection_.get()); }

Result<Transaction> Transaction::Begin(Database& database) {
  DSEC_TRY_VOID(database.Execute("BEGIN IMMEDIATE"));
  return Transaction(database);
}

Transaction::~Transaction() {
  // A failed ROLLBACK means that SQLite has already rolled back by itself.
  if (database_ != nullptr) (void)database_->Execute("ROLLBACK");
}

Result<void> Transaction::Commit() {
  DSEC_TRY_VOID(database_->Execute("COMMIT"));
  database_ = nullptr;
  return Ok();
}

}  // namespace dsec::store
