//! The smallest programs that start and stay: hand-written static ELF files, so that digests do not
//! depend on a compiler.

/// `for (;;) pause();`
const AMD64: &[u8] = &[
    0xb8, 0x22, 0x00, 0x00, 0x00, // mov eax, 34 (pause)
    0x0f, 0x05, // syscall
    0xeb, 0xf7, // jmp back
];

/// `for (;;) ppoll(0, 0, 0, 0);`, because arm64 has no pause.
const ARM64: &[u32] = &[
    0xd280_0928, // mov x8, #73 (ppoll)
    0xd280_0000, // mov x0, #0
    0xd280_0001, // mov x1, #0
    0xd280_0002, // mov x2, #0
    0xd280_0003, // mov x3, #0
    0xd400_0001, // svc #0
    0x17ff_fffa, // b back
];

const HEADERS: u64 = 64 + 56;
const BASE: u64 = 0x0040_0000;

fn program(architecture: &str) -> Vec<u8> {
    let (machine, code): (u16, Vec<u8>) = match architecture {
        "amd64" => (62, AMD64.to_vec()),
        "arm64" => (
            183,
            ARM64.iter().flat_map(|word| word.to_le_bytes()).collect(),
        ),
        // Never executed: the name alone makes a distinct layer.
        other => return other.as_bytes().to_vec(),
    };
    let size = HEADERS + code.len() as u64;
    let mut file = Vec::new();
    file.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    file.extend(2_u16.to_le_bytes()); // ET_EXEC
    file.extend(machine.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    file.extend((BASE + HEADERS).to_le_bytes()); // entry
    file.extend(64_u64.to_le_bytes()); // program headers follow
    file.extend(0_u64.to_le_bytes());
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend(1_u32.to_le_bytes()); // PT_LOAD
    file.extend(5_u32.to_le_bytes()); // readable, executable
    for word in [0, BASE, BASE, size, size, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// An uncompressed tar with the program as `/app`: compression would depend on the library's
/// version.
pub(crate) fn layer(architecture: &str) -> Vec<u8> {
    let data = program(architecture);
    let mut header = [0_u8; 512];
    let mut put = |at: usize, text: &[u8]| {
        for (to, from) in header.iter_mut().skip(at).zip(text) {
            *to = *from;
        }
    };
    put(0, b"app");
    put(100, b"0000755\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{:011o}\0", data.len()).as_bytes());
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    for (to, from) in header
        .iter_mut()
        .skip(148)
        .zip(format!("{sum:06o}\0 ").bytes())
    {
        *to = from;
    }
    let mut tar = header.to_vec();
    tar.extend(&data);
    tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
    tar
}
