# SPDX-License-Identifier: Apache-2.0
# The project's own target helpers. Every folder under src/ is one library target dsec_<folder> with the alias
# dsec::<folder>; sources are listed, never globbed.

add_library(dsec_flags INTERFACE)
target_compile_options(dsec_flags INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror -fno-omit-frame-pointer
  $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual -Wnon-virtual-dtor>)
target_compile_options(dsec_flags INTERFACE -gline-tables-only)
target_include_directories(dsec_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_definitions(dsec_flags INTERFACE _FILE_OFFSET_BITS=64 DSEC_VERSION="${PROJECT_VERSION}")
target_link_options(dsec_flags INTERFACE -fuse-ld=lld)

add_library(dsec_sanitize INTERFACE)
if(DSEC_SANITIZE)
  target_compile_options(dsec_sanitize INTERFACE -fsanitize=${DSEC_SANITIZE} -fno-sanitize-recover=all)
  target_link_options(dsec_sanitize INTERFACE -fsanitize=${DSEC_SANITIZE})
endif()

# dsec_library(NAME SOURCES a.cc b.cc DEPS dsec::base ... [STATIC_SAFE])
# STATIC_SAFE: linked into the small static binaries that run next to sandboxes; built a second time without
# sanitizers as dsec_<name>_static.
function(dsec_library name)
  cmake_parse_arguments(ARG "STATIC_SAFE" "" "SOURCES;DEPS;STATIC_DEPS" ${ARGN})
  add_library(dsec_${name} STATIC ${ARG_SOURCES})
  add_library(dsec::${name} ALIAS dsec_${name})
  target_link_libraries(dsec_${name} PUBLIC dsec_sanitize ${ARG_DEPS} PRIVATE dsec_flags)
  target_include_directories(dsec_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  if(ARG_STATIC_SAFE)
    add_library(dsec_${name}_static STATIC ${ARG_SOURCES})
    target_link_libraries(dsec_${name}_static PUBLIC ${ARG_STATIC_DEPS} PRIVATE dsec_flags)
    target_compile_options(dsec_${name}_static PRIVATE -Os -ffunction-sections -fdata-sections)
    target_include_directories(dsec_${name}_static PUBLIC ${CMAKE_SOURCE_DIR}/src)
  endif()
endfunction()

# dsec_test(NAME LABEL SOURCES ... DEPS ...): one GoogleTest binary, one ctest entry with that label.
# LABEL is one of unit, component, privileged, system, chaos, security, fuzz, vm, lint.
function(dsec_test name label)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dsec_flags dsec_sanitize GTest::gtest GTest::gmock GTest::gtest_main
                        Threads::Threads)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${ARG_TIMEOUT})
  if(NOT label STREQUAL "unit")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

# dsec_fuzz(NAME SOURCES ... DEPS ... CORPUS dir): libFuzzer target; ctest runs the corpus plus a bounded number of new
# inputs. Without DSEC_FUZZ nothing is built.
function(dsec_fuzz name)
  cmake_parse_arguments(ARG "" "CORPUS" "SOURCES;DEPS" ${ARGN})
  if(NOT DSEC_FUZZ)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dsec_flags dsec_sanitize)
  target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_test(NAME ${name} COMMAND ${name} -runs=20000 -max_total_time=20 -rss_limit_mb=1024 ${ARG_CORPUS})
  set_tests_properties(${name} PROPERTIES LABELS fuzz TIMEOUT 120)
endfunction()

# dsec_static_binary(NAME SOURCES ... DEPS ...): a static, non-PIE binary without sanitizers, for code that runs beside
# or above a sandbox and must be small (spawner, aether, floor programs of the benchmarks).
function(dsec_static_binary name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dsec_flags)
  target_compile_options(${name} PRIVATE -Os -ffunction-sections -fdata-sections)
  target_link_options(${name} PRIVATE -static -no-pie -Wl,--gc-sections -Wl,-z,norelro)
endfunction()
