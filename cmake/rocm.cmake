# Compiles csrc/gpu as HIP for AMD's GPUs: by ROCm's own hipcc where it is new enough, else by a clang of LLVM 19 or
# later with any HIP headers (Debian: clang-19 libamdhip64-dev), for which no GPU and no ROCm are needed. Kernels use
# compiler builtins only, so no device library is looked for; the HIP runtime is not linked (csrc/gpu/hip_runtime.h).

set(KVIO_ROCM_ARCHS "" CACHE STRING "gfx targets; empty: gfx90a, gfx942, and gfx950 where the compiler knows it")
set(KVIO_HIP_COMPILER "" CACHE FILEPATH "hipcc or clang++; empty: looked for")
set(KVIO_ROCM_PATH "$ENV{ROCM_PATH}")  # looked at first; then beside the compiler, /opt/rocm, /usr

# Sets `out` to the candidate if it is new enough, else to nothing.
function(kvio_accept_hip_compiler candidate out)
  set(${out} "" PARENT_SCOPE)
  if(NOT candidate)
    return()
  endif()
  execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    return()
  endif()
  # hipcc of ROCm 6.0 and clang 19 are the first with every target of the default list.
  if((text MATCHES "HIP version: ([0-9]+)" AND CMAKE_MATCH_1 GREATER_EQUAL 6)
     OR (NOT text MATCHES "HIP version" AND text MATCHES "clang version ([0-9]+)" AND CMAKE_MATCH_1 GREATER_EQUAL 19))
    set(${out} "${candidate}" PARENT_SCOPE)
  endif()
endfunction()

function(kvio_find_hip_compiler)
  set(tried "")
  if(KVIO_HIP_COMPILER)
    set(candidates "${KVIO_HIP_COMPILER}")
  else()
    # An old hipcc of the distribution's must not hide ROCm's own.
    set(candidates "")
    foreach(folder IN ITEMS "${KVIO_ROCM_PATH}" /opt/rocm)
      if(folder AND EXISTS "${folder}/bin/hipcc")
        list(APPEND candidates "${folder}/bin/hipcc")
      endif()
    endforeach()
    find_program(KVIO_HIPCC hipcc)
    list(APPEND candidates "${KVIO_HIPCC}")
    foreach(version 22 21 20 19)
      find_program(KVIO_CLANG_${version} clang++-${version})
      list(APPEND candidates "${KVIO_CLANG_${version}}")
    endforeach()
    find_program(KVIO_CLANG clang++)
    list(APPEND candidates "${KVIO_CLANG}")
  endif()
  foreach(candidate IN LISTS candidates)
    kvio_accept_hip_compiler("${candidate}" accepted)
    if(accepted)
      set(KVIO_HIP "${accepted}" PARENT_SCOPE)
      return()
    endif()
    if(candidate)
      string(APPEND tried " ${candidate}")
    endif()
  endforeach()
  message(FATAL_ERROR "KVIO_BACKEND is 'rocm' but no HIP compiler was found (too old, or no compiler:${tried}); it "
                      "needs hipcc of ROCm 6.0 or later, or clang 19 or later (Debian: clang-19 lld-19), or "
                      "KVIO_HIP_COMPILER")
endfunction()

kvio_find_hip_compiler()
execute_process(COMMAND "${KVIO_HIP}" --version OUTPUT_VARIABLE KVIO_HIP_VERSION)
string(REGEX MATCH "clang version [0-9.]+" KVIO_HIP_VERSION "${KVIO_HIP_VERSION}")

get_filename_component(beside "${KVIO_HIP}" DIRECTORY)
get_filename_component(beside "${beside}" DIRECTORY)
find_path(KVIO_HIP_INCLUDE hip/hip_runtime_api.h
          HINTS "${KVIO_ROCM_PATH}/include" "${beside}/include" PATHS /opt/rocm/include /usr/include)
if(NOT KVIO_HIP_INCLUDE)
  message(FATAL_ERROR "KVIO_BACKEND is 'rocm' but hip/hip_runtime_api.h was not found; it needs ROCm's headers "
                      "(Debian: libamdhip64-dev) or ROCM_PATH")
endif()

set(KVIO_HIP_FLAGS -x hip -nogpulib -std=c++17 -O3 -fPIC -fvisibility=hidden -DKVIO_ROCM -D__HIP_PLATFORM_AMD__
                   -Wall -Wextra -Wno-unused-parameter -I "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
# Puts the headers last among the system's, where /usr/include has to be.
get_filename_component(root "${KVIO_HIP_INCLUDE}" DIRECTORY)
list(APPEND KVIO_HIP_FLAGS "--rocm-path=${root}")

# Whether the compiler makes code for `arch`, with which the kernels' waves of 64 lanes are right.
function(kvio_knows_gfx arch out)
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/gfx_probe.hip")
  file(WRITE "${probe}" "__attribute__((global)) void probe() {}\n")
  execute_process(COMMAND "${KVIO_HIP}" -x hip -nogpulib -nogpuinc --offload-device-only --offload-arch=${arch}
                          -c "${probe}" -o "${probe}.o" OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(${out} FALSE PARENT_SCOPE)
  else()
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()

set(KVIO_GFX "")
if(KVIO_ROCM_ARCHS)
  foreach(arch IN LISTS KVIO_ROCM_ARCHS)
    kvio_knows_gfx("${arch}" known)
    if(NOT known)
      message(FATAL_ERROR "KVIO_ROCM_ARCHS names '${arch}', which ${KVIO_HIP} (${KVIO_HIP_VERSION}) does not know; it "
                          "needs targets of that compiler, for example gfx90a;gfx942")
    endif()
    if(NOT arch MATCHES "^gfx9")
      message(FATAL_ERROR "KVIO_ROCM_ARCHS names '${arch}', whose waves have 32 lanes; it needs targets with waves of 64 "
                          "lanes (gfx9...), for which plan/platform.h is written")
    endif()
    list(APPEND KVIO_GFX "${arch}")
  endforeach()
else()
  set(KVIO_GFX gfx90a gfx942)
  kvio_knows_gfx(gfx950 known)
  if(known)
    list(APPEND KVIO_GFX gfx950)
  endif()
endif()
set(KVIO_OFFLOAD "")
foreach(arch IN LISTS KVIO_GFX)
  list(APPEND KVIO_OFFLOAD --offload-arch=${arch})
endforeach()
message(STATUS "HIP by ${KVIO_HIP} (${KVIO_HIP_VERSION}) for ${KVIO_GFX}, headers in ${KVIO_HIP_INCLUDE}")

# Objects with the host and device code of the .cu files given, into `out`.
function(kvio_hip_objects out)
  set(objects "")
  foreach(source IN LISTS ARGN)
    get_filename_component(name "${source}" NAME)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/hip/${name}.o")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${CMAKE_COMMAND}" -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/hip"
      COMMAND "${KVIO_HIP}" ${KVIO_HIP_FLAGS} ${KVIO_OFFLOAD} -MD -MF "${object}.d" -MT "${object}"
              -c "${CMAKE_CURRENT_SOURCE_DIR}/${source}" -o "${object}"
      DEPENDS "${source}"
      DEPFILE "${object}.d"
      COMMENT "Building HIP object hip/${name}.o"
      VERBATIM)
    set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
    list(APPEND objects "${object}")
  endforeach()
  set(${out} "${objects}" PARENT_SCOPE)
endfunction()
