// Files that must survive: whole-file reads, and writes that are either complete or absent.
#pragma once

#include <string>

namespace banyan::io {

std::string read_text(const std::string& path);  // throws FileError

// Writes to "<path>.tmp-<pid>", fsyncs, renames over `path`, fsyncs the folder. Throws FileError.
void write_text_atomic(const std::string& path, const std::string& text);

// Makes `from` (a finished temporary folder) appear as `to` in one rename; fsyncs every file under
// it, the folder and its parent. Throws FileError; `to` must not exist.
void commit_directory(const std::string& from, const std::string& to);

}  // namespace banyan::io
