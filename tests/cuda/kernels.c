/* The few kernels that compute: filling a tensor with a number, multiplying one by a number, and joining tensors end to
 * end, all in one piece. What the ranks of a run tell each other in a step (stop, save, copy the state) is written and
 * scaled by the first two. DDP joins the weights that it sends to all ranks at the start. */
#include <stdio.h>
#include <string.h>

#include "standin.h"

enum kind { FILL, MULTIPLY, JOIN };
static struct {
    const void *function;
    enum kind kind;
    bool is_double;
    int size, room; /* of a number of tensors that are joined, and how many fit into the arguments */
} known[256];
static int count;

/* Remember a kernel of torch's library if it is one of these. */
void standin_learn(const void *function, const char *name)
{
    static const struct { const char *functor; enum kind kind; bool is_double; } FUNCTORS[] = {
        {"11FillFunctorIfE", FILL, false},
        {"11FillFunctorIdE", FILL, true},
        {"UnaryFunctorIfffNS0_15binary_internal10MulFunctorIfEEEE", MULTIPLY, false},
        {"UnaryFunctorIdddNS0_15binary_internal10MulFunctorIdEEEE", MULTIPLY, true},
    };
    const char *joined = strstr(name, "10OpaqueTypeILj");
    if (strstr(name, "CatArrayBatchedCopy") && joined && count < (int)(sizeof known / sizeof *known) &&
        sscanf(joined, "10OpaqueTypeILj%dEEEjLi1ELi%dE", &known[count].size, &known[count].room) == 2) {
        known[count].function = function;
        known[count++].kind = JOIN;
    }
    if (!strstr(name, "29vectorized_elementwise_kernelI") && !strstr(name, "27unrolled_elementwise_kernelI"))
        return;
    for (size_t n = 0; n < sizeof FUNCTORS / sizeof *FUNCTORS; n++)
        if (strstr(name, FUNCTORS[n].functor) && count < (int)(sizeof known / sizeof *known)) {
            known[count].function = function;
            known[count].kind = FUNCTORS[n].kind;
            known[count++].is_double = FUNCTORS[n].is_double;
        }
}

/* Arguments: the output, and by value arrays for so many inputs as there is room for: pointers; then, as 32-bit numbers,
 * where each begins in the output, its size, its number of elements; then whether it is in one piece. */
static void join(int size, int room, int inputs, void **arguments)
{
    char *out = *(char **)arguments[0];
    void **in = arguments[1];
    uint32_t *begin = (uint32_t *)(in + room), *elements = begin + 2 * room;
    bool *is_whole = (bool *)(elements + room);
    for (int i = 0; i < inputs; i++)
        if (is_whole[i])
            memcpy(out + (size_t)begin[i] * (size_t)size, in[i], (size_t)elements[i] * (size_t)size);
}

void standin_compute(const void *function, unsigned rows, void **arguments)
{
    int n = 0;
    while (n < count && known[n].function != function)
        n++;
    if (n == count)
        return;
    if (known[n].kind == JOIN) {
        join(known[n].size, known[n].room, (int)rows, arguments);
        return;
    }
    int items = *(int *)arguments[0]; /* then the functor, and the pointers to the output and the input */
    void **data = arguments[2];
    /* the number is all that a FillFunctor holds, and follows an empty struct in the other */
#define COMPUTE(type) \
    do { \
        type number = ((type *)arguments[1])[known[n].kind == FILL ? 0 : 1]; \
        for (int i = 0; i < items; i++) \
            ((type *)data[0])[i] = known[n].kind == FILL ? number : number * ((const type *)data[1])[i]; \
    } while (0)
    if (known[n].is_double)
        COMPUTE(double);
    else
        COMPUTE(float);
}
