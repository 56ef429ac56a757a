/* A delay and losses on the way from hosts into the network, for kernels without netem.
 *
 *     delay_line DELAY_MS LOSS_PERCENT INSIDE OUTSIDE [INSIDE OUTSIDE ...]
 *
 * Each pair is a link: two interfaces (taps) that this process makes. It carries frames from the inside to the outside
 * with the delay and the losses, and back without. Frames are as large as TCP offers them (64 KB), so that this costs
 * little. It prints a line when the interfaces are there, and ends, and they with it, when its standard input does. Its
 * processor time is not that of a benchmark's jobs, but it takes it from the same cores; a frame comes some 0.1 ms late.
 *
 * Losses are of single packets as a network carries them (1,500 bytes), each for itself: of a large frame all others
 * arrive. netem would lose all of it.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST_LINKS = 64, FRAME_BYTES = (64 << 10) + 256, IN_A_ROW = 32, ETHERNET_BYTES = 14, FIN = 1, PSH = 8 };

struct held {
    struct held *next;
    int64_t due_ns;
    int target;
    size_t length;
    unsigned char frame[];
};

static struct held *first, **last = &first;
static double loss;        /* of a packet */
static int64_t until_loss; /* packets that still arrive before the next one that is lost */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void draw_gap(void) { until_loss = loss > 0 ? (int64_t)(log(1.0 - drand48()) / log1p(-loss)) : INT64_MAX / 2; }

static void put(int target, const unsigned char *frame, size_t length)
{
    if (write(target, frame, length) < 0 && errno != EAGAIN && errno != EIO)
        perror("delay_line: write"); /* an interface that is down, or full, loses frames */
}

static void hold(int target, int64_t due_ns, const unsigned char *frame, size_t length)
{
    struct held *each = malloc(sizeof *each + length);
    if (!each) exit(1);
    *each = (struct held){NULL, due_ns, target, length};
    memcpy(each->frame, frame, length);
    *last = each;
    last = &each->next;
}

/* The sum of an internet checksum (RFC 1071), of an even number of bytes. */
static uint32_t sum16(const unsigned char *data, size_t length, uint32_t total)
{
    for (size_t i = 0; i < length; i += 2) total += data[i] << 8 | data[i + 1];
    while (total > 0xFFFF) total = (total & 0xFFFF) + (total >> 16);
    return total;
}

static void store16(unsigned char *at, uint32_t value) { at[0] = value >> 8, at[1] = value; }

/* Hold packets `from` to `to` of the `count` of a frame of TCP over IPv4, whose data begins at `body`. */
static void hold_part(int target, int64_t due_ns, const unsigned char *frame, size_t length, size_t body, int64_t from,
                      int64_t to, int64_t count)
{
    static unsigned char part[FRAME_BYTES];
    struct virtio_net_hdr header;
    memcpy(&header, frame, sizeof header);
    size_t begin = body + from * header.gso_size, end = body + to * header.gso_size;
    if (end > length) end = length;
    memcpy(part, frame, body);
    memcpy(part + body, frame + begin, end - begin);
    if (to - from == 1) ((struct virtio_net_hdr *)part)->gso_type = 0, ((struct virtio_net_hdr *)part)->gso_size = 0;
    unsigned char *ip = part + sizeof header + ETHERNET_BYTES, *tcp = part + sizeof header + header.csum_start;
    size_t ip_bytes = 4 * (ip[0] & 15), whole = body + (end - begin) - (ip - part);
    store16(ip + 2, whole);
    store16(ip + 4, (ip[4] << 8 | ip[5]) + from);
    store16(ip + 10, 0);
    store16(ip + 10, ~sum16(ip, ip_bytes, 0));
    uint32_t sequence;
    memcpy(&sequence, tcp + 4, 4);
    sequence = htonl(ntohl(sequence) + from * header.gso_size);
    memcpy(tcp + 4, &sequence, 4);
    if (to < count) tcp[13] &= ~(FIN | PSH);
    /* The kernel completes the checksum; so far it covers both addresses, the protocol and the length. */
    store16(tcp + header.csum_offset, sum16(ip + 12, 8, ip[9] + (whole - ip_bytes)));
    hold(target, due_ns, part, body + (end - begin));
}

/* Hold what arrives of a frame. */
static void hold_survivors(int target, int64_t due_ns, const unsigned char *frame, size_t length)
{
    struct virtio_net_hdr header;
    memcpy(&header, frame, sizeof header);
    int is_tcp = (header.gso_type & 0x7F) == VIRTIO_NET_HDR_GSO_TCPV4;
    size_t tcp = sizeof header + header.csum_start, body = is_tcp ? tcp + 4 * (frame[tcp + 12] >> 4) : 0;
    int64_t count = is_tcp ? (length - body + header.gso_size - 1) / header.gso_size : 1, from = 0;
    if (until_loss >= count) {
        until_loss -= count;
        hold(target, due_ns, frame, length);
        return;
    }
    while (from < count) {
        int64_t to = until_loss < count - from ? from + until_loss : count;
        if (to > from) hold_part(target, due_ns, frame, length, body, from, to, count);
        until_loss -= to - from;
        if (to < count) draw_gap();
        from = to + 1;
    }
}

static int tap(const char *name)
{
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) {
        perror(name);
        exit(1);
    }
    return fd;
}

int main(int count, char **words)
{
    static unsigned char frame[FRAME_BYTES];
    struct pollfd ways[MOST_LINKS * 2 + 1];
    int links = (count - 3) / 2, polled = 2 * links + 1;
    if (links < 1 || links > MOST_LINKS || count % 2 == 0) return 2;
    int64_t delay_ns = atof(words[1]) * 1e6;
    loss = atof(words[2]) / 100;
    draw_gap();
    prctl(PR_SET_TIMERSLACK, 1);
    setpriority(PRIO_PROCESS, 0, -20); /* or it would wait for the processor behind those it carries for */
    for (int i = 0; i < 2 * links; i++) ways[i] = (struct pollfd){tap(words[3 + i]), POLLIN, 0}; /* inside, outside */
    ways[2 * links] = (struct pollfd){0, POLLIN, 0};
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t wait_ns = first ? first->due_ns - now_ns() : 1000000000LL;
        if (wait_ns < 0) wait_ns = 0;
        struct timespec wait = {wait_ns / 1000000000LL, wait_ns % 1000000000LL};
        if (ppoll(ways, polled, &wait, NULL) > 0) {
            if (ways[2 * links].revents) return 0;
            for (int i = 0; i < 2 * links; i++) {
                for (int taken = 0; ways[i].revents && taken < IN_A_ROW; taken++) {
                    ssize_t length = read(ways[i].fd, frame, sizeof frame);
                    if (length <= 0) break; /* no more; or the interface is down, still or again */
                    if (i % 2)
                        put(ways[i - 1].fd, frame, length);
                    else
                        hold_survivors(ways[i + 1].fd, now_ns() + delay_ns, frame, length);
                }
            }
        }
        for (int64_t now = now_ns(); first && first->due_ns <= now;) {
            struct held *each = first;
            if (!(first = each->next)) last = &first;
            put(each->target, each->frame, each->length);
            free(each);
        }
    }
}
