# Imported targets for the LibTorch inside the torch wheel of the running Python.
# find_package(Torch) is not used: with a CUDA wheel it fails where no CUDA toolkit is installed.
#   banyan::torch         headers, libtorch_cpu, libc10 (what the core links)
#   banyan::torch_python  libtorch_python (what the extension module links in addition)
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import torch; print(torch.__path__[0]); print(torch.__version__); print(int(torch.compiled_with_cxx11_abi()))"
  OUTPUT_VARIABLE torch_facts
  RESULT_VARIABLE torch_status
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "banyan builds against the torch wheel of ${Python_EXECUTABLE}, which cannot import torch")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 BANYAN_TORCH_DIR)
list(GET torch_facts 1 BANYAN_TORCH_VERSION)
list(GET torch_facts 2 BANYAN_TORCH_ABI)
message(STATUS "torch ${BANYAN_TORCH_VERSION} in ${BANYAN_TORCH_DIR}")

add_library(banyan_torch INTERFACE)
add_library(banyan::torch ALIAS banyan_torch)
target_include_directories(banyan_torch SYSTEM INTERFACE
  ${BANYAN_TORCH_DIR}/include
  ${BANYAN_TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(banyan_torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=${BANYAN_TORCH_ABI}
  BANYAN_TORCH_VERSION="${BANYAN_TORCH_VERSION}")
target_link_libraries(banyan_torch INTERFACE
  ${BANYAN_TORCH_DIR}/lib/libtorch_cpu.so
  ${BANYAN_TORCH_DIR}/lib/libc10.so
  # libtorch.so pulls in the device libraries of a CUDA wheel; nothing in it is named at link time.
  -Wl,--no-as-needed ${BANYAN_TORCH_DIR}/lib/libtorch.so -Wl,--as-needed)

# OpenMP: compile with it, but link the runtime that torch itself loads, so that a process has one thread pool.
file(GLOB torch_openmp ${BANYAN_TORCH_DIR}/lib/libgomp*.so* ${BANYAN_TORCH_DIR}/../torch.libs/libgomp*.so*)
target_compile_options(banyan_torch INTERFACE -fopenmp)
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
  target_link_libraries(banyan_torch INTERFACE ${torch_openmp})
else()
  target_link_options(banyan_torch INTERFACE -fopenmp)
endif()

add_library(banyan_torch_python INTERFACE)
add_library(banyan::torch_python ALIAS banyan_torch_python)
target_link_libraries(banyan_torch_python INTERFACE ${BANYAN_TORCH_DIR}/lib/libtorch_python.so)
