// Controls for racecheck: what the tool reports where the truth is known. One kernel per way to hand a place in shared memory over,
// named ordered_ or unordered_ by what is true of it. 128 threads write, 128 read; no kernel can hang.
//
//     nvcc -gencode arch=compute_90a,code=sm_90a -lineinfo -o controls tests/verify/racecheck_controls.cu
//     PYTHONPATH=.:tests python -m verify.racecheck --tool PATH/compute-sanitizer --controls ./controls
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

constexpr int PLACES = 2, ROUNDS = 8;

__device__ uint32_t at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void init(uint64_t *b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(count) : "memory"); }
__device__ void arrive(uint64_t *b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ void expect(uint64_t *b, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(b)), "r"(bytes) : "memory"); }
__device__ void when_copied(uint64_t *b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at(b)) : "memory"); }
__device__ void copy16(void *to, const void *from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(to)), "l"(from) : "memory"); }
__device__ void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ void meet_all() { asm volatile("barrier.sync 1;" ::: "memory"); }
__device__ uint32_t of_peer(uint32_t mine) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(mine), "r"((blockIdx.x & 1) ^ 1));
  return there;
}
__device__ void cluster_sync() {
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ void wait(uint64_t *b, int parity) {
  asm volatile("{\n.reg .pred p;\nL_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L_%=;\n}" ::"r"(at(b)), "r"(parity) : "memory");
}
// The arrival of 128 threads: by each of them, or by one, behind a meeting or not.
enum Arrival { EVERY, ONE, ALONE };
template <Arrival A> __device__ void arrive_as(uint64_t *b, int id) {
  if (A == ONE) meet(id, 128);
  if (A == EVERY || (threadIdx.x & 127) == 0) arrive(b);
}

// A ring of two places. WAITS: whether anybody waits. EARLY: the readers free a place before they read it.
template <Arrival A, bool WAITS, bool EARLY> __device__ void ring(int *out) {
  __shared__ int buffer[PLACES][128];
  __shared__ uint64_t full[PLACES], empty[PLACES];
  if (threadIdx.x == 0)
    for (int i = 0; i < PLACES; i++) { init(&full[i], A == EVERY ? 128 : 1); init(&empty[i], A == EVERY ? 128 : 1); }
  __syncthreads();
  int t = threadIdx.x & 127, sum = 0;
  for (int i = 0; i < ROUNDS; i++) {
    int s = i % PLACES, k = i / PLACES;
    if (threadIdx.x < 128) {
      if (WAITS) wait(&empty[s], (k & 1) ^ 1);
      buffer[s][t] = i * 1000 + t;
      arrive_as<A>(&full[s], 2);
    } else {
      if (WAITS) wait(&full[s], k & 1);
      if (EARLY) arrive_as<A>(&empty[s], 3);
      sum += buffer[s][t ^ 37];
      if (!EARLY) arrive_as<A>(&empty[s], 3);
    }
  }
  if (threadIdx.x >= 128) out[blockIdx.x * 128 + t] = sum;
}
__global__ void ordered_every_thread_arrives(int *out, const int4 *) { ring<EVERY, true, false>(out); }
__global__ void ordered_one_arrives_behind_a_barsync(int *out, const int4 *) { ring<ONE, true, false>(out); }
__global__ void unordered_one_arrives_alone(int *out, const int4 *) { ring<ALONE, true, false>(out); }
__global__ void unordered_nobody_waits(int *out, const int4 *) { ring<ONE, false, false>(out); }
__global__ void unordered_freed_too_early(int *out, const int4 *) { ring<EVERY, true, true>(out); }
__global__ void ordered_barsync_alone(int *out, const int4 *) {
  __shared__ int buffer[256];
  int sum = 0;
  for (int i = 0; i < ROUNDS; i++) { buffer[threadIdx.x] = i; __syncthreads(); sum += buffer[threadIdx.x ^ 200]; __syncthreads(); }
  out[blockIdx.x * 128 + (threadIdx.x & 127)] = sum;
}

// 64 threads write, the next 64 pass on, the next 64 read: ordered through those between them.
template <bool EACH> __device__ void chain(int *out) {
  __shared__ int buffer[64];
  __shared__ uint64_t first, second;
  if (threadIdx.x == 0) { init(&first, EACH ? 64 : 1); init(&second, EACH ? 64 : 1); }
  __syncthreads();
  int group = threadIdx.x / 64, t = threadIdx.x % 64;
  if (group == 0) buffer[t] = t;
  if (group == 1) wait(&first, 0);
  if (group == 2) { wait(&second, 0); out[t] = buffer[t ^ 5]; }
  if (group < 2) {
    if (!EACH) meet(2 + group, 64);
    if (EACH || t == 0) arrive(group == 0 ? &first : &second);
  }
}
__global__ void ordered_chain_every_thread(int *out, const int4 *) { chain<true>(out); }
__global__ void ordered_chain_one(int *out, const int4 *) { chain<false>(out); }

// More barriers than any of our kernels has.
template <Arrival A> __device__ void many(int *out) {
  __shared__ int buffer[24][128];
  __shared__ uint64_t full[24];
  if (threadIdx.x == 0)
    for (int i = 0; i < 24; i++) init(&full[i], A == EVERY ? 128 : 1);
  __syncthreads();
  int t = threadIdx.x & 127, sum = 0;
  for (int i = 0; i < 24; i++) {
    if (threadIdx.x < 128) { buffer[i][t] = i; arrive_as<A>(&full[i], 2); }
    else { wait(&full[i], 0); sum += buffer[i][t ^ 37]; }
  }
  if (threadIdx.x >= 128) out[t] = sum;
}
__global__ void ordered_24_barriers_every_thread(int *out, const int4 *) { many<EVERY>(out); }
__global__ void ordered_24_barriers_one(int *out, const int4 *) { many<ONE>(out); }

// Places that cp.async fills: the copies arrive, or a group is waited for and one thread arrives, or it is not waited for.
enum Copies { ARRIVE, GROUP, UNWAITED };
template <Copies C> __device__ void copies(int *out, const int4 *in) {
  __shared__ int4 buffer[PLACES][128];
  __shared__ uint64_t full[PLACES], empty[PLACES];
  if (threadIdx.x == 0)
    for (int i = 0; i < PLACES; i++) { init(&full[i], C == ARRIVE ? 128 : 1); init(&empty[i], C == ARRIVE ? 128 : 1); }
  __syncthreads();
  int t = threadIdx.x & 127, sum = 0;
  for (int i = 0; i < ROUNDS; i++) {
    int s = i % PLACES, k = i / PLACES;
    if (threadIdx.x < 128) {
      wait(&empty[s], (k & 1) ^ 1);
      copy16(&buffer[s][t], in + t);
      if (C == ARRIVE) { when_copied(&full[s]); continue; }
      asm volatile("cp.async.commit_group;");
      if (C == GROUP) asm volatile("cp.async.wait_group 0;" ::: "memory");
      arrive_as<ONE>(&full[s], 2);
    } else {
      wait(&full[s], k & 1);
      sum += buffer[s][t ^ 37].x;
      if (C == ARRIVE) arrive(&empty[s]); else arrive_as<ONE>(&empty[s], 3);
    }
  }
  if (threadIdx.x >= 128) out[blockIdx.x * 128 + t] = sum;
}
__global__ void ordered_copies_arrive(int *out, const int4 *in) { copies<ARRIVE>(out, in); }
__global__ void ordered_copies_waited_for_one_arrives(int *out, const int4 *in) { copies<GROUP>(out, in); }
__global__ void unordered_copies_not_waited_for(int *out, const int4 *in) { copies<UNWAITED>(out, in); }

// Places that one thread fills with bulk copies.
template <Arrival A> __device__ void bulk(int *out, const int4 *in) {
  __shared__ alignas(128) int4 buffer[PLACES][128];
  __shared__ uint64_t full[PLACES], empty[PLACES];
  if (threadIdx.x == 0)
    for (int i = 0; i < PLACES; i++) { init(&full[i], 1); init(&empty[i], A == EVERY ? 128 : 1); }
  __syncthreads();
  int t = threadIdx.x & 127, sum = 0;
  for (int i = 0; i < ROUNDS; i++) {
    int s = i % PLACES, k = i / PLACES;
    if (threadIdx.x == 0) {
      wait(&empty[s], (k & 1) ^ 1);
      expect(&full[s], 2048);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];" ::"r"(at(buffer[s])), "l"(in), "r"(at(&full[s])) : "memory");
    } else if (threadIdx.x >= 128) {
      wait(&full[s], k & 1);
      sum += buffer[s][t ^ 37].x;
      arrive_as<A>(&empty[s], 3);
    }
  }
  if (threadIdx.x >= 128) out[blockIdx.x * 128 + t] = sum;
}
__global__ void ordered_bulk_copies_every_reader(int *out, const int4 *in) { bulk<EVERY>(out, in); }
__global__ void ordered_bulk_copies_one_reader(int *out, const int4 *in) { bulk<ONE>(out, in); }

// What Triton does at warp_specialize: two groups meet at barrier.sync 1 from different places, and what is handed over is written again.
template <bool MEETS> __device__ void handed(int *out) {
  __shared__ int given[32], scratch[128];
  int t = threadIdx.x & 127, sum = 0;
  for (int i = 0; i < 3; i++) {
    if (threadIdx.x < 128) {
      scratch[t] = t; meet(0, 128); sum += scratch[t ^ 37]; meet(0, 128);
      if (t < 32) given[t] = i + t;
      if (MEETS) meet_all();
      sum++;
      if (MEETS) meet_all();
    } else {
      if (MEETS) meet_all();
      sum += given[t & 31];
      if (MEETS) meet_all();
    }
  }
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}
__global__ void ordered_meeting_of_partitions(int *out, const int4 *) { handed<true>(out); }
__global__ void unordered_partitions_that_do_not_meet(int *out, const int4 *) { handed<false>(out); }

// The protocol of sm90_cluster_fp8: each CTA's writers fill their half of a place and copy it to the other CTA; a place is free when the
// readers of both CTAs have left it. COPIES: threads of a warp that copy a part each. APART: partitions come to the cluster's barrier
// from different places.
template <int COPIES, bool EACH, bool APART> __device__ void cluster_ring(int *out) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto buffer = (int4(*)[2][128])raw;
  __shared__ uint64_t full[PLACES], empty[PLACES];
  int t = threadIdx.x & 127, rank = blockIdx.x & 1, sum = 0;
  if (threadIdx.x == 0)
    for (int i = 0; i < PLACES; i++) { init(&full[i], EACH ? 128 : 1); init(&empty[i], EACH ? 256 : 2); }
  if (!APART) cluster_sync();
  if (threadIdx.x < 128) {
    if (APART) { meet(2, 128); cluster_sync(); }
    for (int i = 0; i < ROUNDS; i++) {
      int s = i % PLACES, k = i / PLACES, bytes = 2048 / COPIES;
      wait(&empty[s], (k & 1) ^ 1);
      buffer[s][rank][t] = make_int4(t + i, rank, 0, 0);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      meet(2, 128);
      if (!EACH) { if (t == 0) expect(&full[s], 2048); }
      else { if (t == 0) asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 2048;" ::"r"(at(&full[s])) : "memory"); arrive(&full[s]); }
      meet(2, 128);
      uint32_t from = at(&buffer[s][rank][0]) + t * bytes;
      if (t < COPIES)
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(of_peer(from)), "r"(from), "r"(bytes), "r"(of_peer(at(&full[s]))) : "memory");
    }
    if (APART) cluster_sync();
  } else {
    if (APART) cluster_sync();
    for (int i = 0; i < ROUNDS; i++) {
      int s = i % PLACES, k = i / PLACES;
      wait(&full[s], k & 1);
      sum += buffer[s][0][t ^ 37].x + buffer[s][1][t ^ 37].x;
      if (!EACH) meet(3, 128);
      if (EACH || t == 0) {
        arrive(&empty[s]);
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_peer(at(&empty[s]))) : "memory");
      }
    }
    if (APART) cluster_sync();
    out[blockIdx.x * 128 + t] = sum;
  }
  if (!APART) cluster_sync();
}
__global__ void __cluster_dims__(2) ordered_cluster_one(int *out, const int4 *) { cluster_ring<1, false, false>(out); }
__global__ void __cluster_dims__(2) ordered_cluster_every_thread(int *out, const int4 *) { cluster_ring<1, true, false>(out); }
__global__ void __cluster_dims__(2) ordered_cluster_four_copies_apart(int *out, const int4 *) { cluster_ring<4, false, true>(out); }
__global__ void __cluster_dims__(2) ordered_cluster_four_copies_apart_every_thread(int *out, const int4 *) { cluster_ring<4, true, true>(out); }

struct Control { const char *name; void (*kernel)(int *, const int4 *); };
#define CONTROL(name) {#name, name}
const Control CONTROLS[] = {
    CONTROL(ordered_every_thread_arrives), CONTROL(ordered_one_arrives_behind_a_barsync), CONTROL(unordered_one_arrives_alone),
    CONTROL(unordered_nobody_waits), CONTROL(unordered_freed_too_early), CONTROL(ordered_barsync_alone), CONTROL(ordered_chain_every_thread),
    CONTROL(ordered_chain_one), CONTROL(ordered_24_barriers_every_thread), CONTROL(ordered_24_barriers_one), CONTROL(ordered_copies_arrive),
    CONTROL(ordered_copies_waited_for_one_arrives), CONTROL(unordered_copies_not_waited_for), CONTROL(ordered_bulk_copies_every_reader),
    CONTROL(ordered_bulk_copies_one_reader), CONTROL(ordered_meeting_of_partitions), CONTROL(unordered_partitions_that_do_not_meet),
    CONTROL(ordered_cluster_one), CONTROL(ordered_cluster_every_thread), CONTROL(ordered_cluster_four_copies_apart),
    CONTROL(ordered_cluster_four_copies_apart_every_thread)};

// With a name: that control alone. Without: the names.
int main(int count, char **words) {
  for (const Control &control : CONTROLS) {
    if (count < 2) { printf("%s\n", control.name); continue; }
    if (strcmp(words[1], control.name)) continue;
    int *out, shared = 2 * PLACES * 128 * 16;
    int4 *in;
    cudaMalloc(&out, 1 << 16);
    cudaMalloc(&in, 1 << 16);
    cudaMemset(in, 0, 1 << 16);
    control.kernel<<<2, 256, strstr(control.name, "cluster") ? shared : 0>>>(out, in);
    cudaError_t error = cudaDeviceSynchronize();
    printf("%s: %s\n", control.name, cudaGetErrorName(error));
    return error != cudaSuccess;
  }
  return 0;
}
