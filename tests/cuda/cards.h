#pragma once
/* The GPUs of the stand-in: the file $STANDIN_CARDS_FILE has a line a GPU, of words `name=value`; cards.py writes it. It is
 * read anew at each question, so that a test can change it: a GPU whose line is gone has vanished. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct card {
    char uuid[96];
    char name[96];                 /* in the file with _ for blanks */
    unsigned major, minor;         /* compute capability */
    unsigned answers;              /* 0: it fell off the bus; 2: cut into parts (MIG), and seen from a container, which may
                                    * not ask for the memory of the whole */
    unsigned use;                  /* percent */
    unsigned long long used, size; /* bytes of memory */
    unsigned celsius, slowdown, milliwatts, limit;
    unsigned long long corrected, uncorrected, reasons;
    unsigned mode, persistence;    /* compute mode, as nvmlComputeMode_t */
    unsigned pid;                  /* of a process that uses it; 0: none */
    unsigned long long bytes;      /* that the process uses */
};

/* Read the GPU in this place of the list, as nvidia-smi numbers them. Returns 0 if there is none. */
static int read_card(unsigned number, struct card *card)
{
    const char *path = getenv("STANDIN_CARDS_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[1024];
    unsigned place = 0;
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file))
        found = place++ == number;
    if (file)
        fclose(file);
    if (!found)
        return 0;
    memset(card, 0, sizeof *card);
    for (char *rest, *word = strtok_r(line, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
        char *value = strchr(word, '=');
        if (!value)
            continue;
        *value++ = 0;
        unsigned long long figure = strtoull(value, NULL, 10);
        if (!strcmp(word, "uuid"))
            snprintf(card->uuid, sizeof card->uuid, "%s", value);
        if (!strcmp(word, "name")) {
            snprintf(card->name, sizeof card->name, "%s", value);
            for (char *blank; (blank = strchr(card->name, '_'));)
                *blank = ' ';
        }
#define FIGURE(field) \
        if (!strcmp(word, #field)) \
            card->field = figure;
        FIGURE(major) FIGURE(minor) FIGURE(answers) FIGURE(use) FIGURE(used) FIGURE(size) FIGURE(celsius)
        FIGURE(slowdown) FIGURE(milliwatts) FIGURE(limit) FIGURE(corrected) FIGURE(uncorrected) FIGURE(reasons)
        FIGURE(mode) FIGURE(persistence) FIGURE(pid) FIGURE(bytes)
#undef FIGURE
    }
    return 1;
}
