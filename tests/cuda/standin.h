/* What the stand-in's C files share. cuda.c has the functions; standin.py has the variables that they read. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STANDIN_CARDS = 64 };

/* The value of the variable STANDIN_NAME, or `otherwise`. */
const char *standin_option(const char *name, const char *otherwise);
/* Number of cards in the machine, whatever CUDA_VISIBLE_DEVICES says. */
int standin_cards(void);
/* Which card a device of this process is; -1 if there is no such device. */
int standin_card(int device);
/* The calling thread's device. */
int standin_device(void);
/* The 16 bytes of a card's UUID: NVML prints them as GPU-00000000-0000-0000-0000-0000000000NN. */
void standin_uuid(int card, unsigned char bytes[16]);
/* The device that memory belongs to; -1 for memory of the host. */
int standin_device_of(const void *pointer);
/* Let the work of a stream (a cudaStream_t) take so many nanoseconds longer. */
void standin_work(void *stream, int64_t nanoseconds);
/* Remember a kernel that computes; compute it if `function` is one, with so many rows of blocks. See kernels.c. */
void standin_learn(const void *function, const char *name);
void standin_compute(const void *function, unsigned rows, void **arguments);
/* Write one line into the log: "PID WORDS…". */
__attribute__((format(printf, 1, 2))) void standin_log(const char *format, ...);
