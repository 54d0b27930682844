//! Executables that tests make. A process that another thread starts meanwhile has the file open
//! for writing until it executes its own program, and the kernel executes no such file (`ETXTBSY`,
//! execve(2)). So another process writes it, and none has it open afterwards.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

/// Copies a program.
pub fn copy_program(from: &Path, to: &Path) {
    install(from, to, Stdio::null());
}

/// Writes a script for a shell.
pub fn write_script(path: &Path, text: &str) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    // It fits into the pipe.
    assert!(text.len() < 4096, "{text}");
    write!(writer, "#!/bin/sh\n{text}\n").unwrap();
    drop(writer);
    install(Path::new("/dev/stdin"), path, reader.into());
}

fn install(from: &Path, to: &Path, stdin: Stdio) {
    let mut install = Command::new("install");
    install
        .args(["--mode", "755"])
        .args([from, to])
        .stdin(stdin);
    let output = install.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
