class Arguments {
  public static void main(String[] args) {
    for (String a : args) System.out.print("[" + a + "]");
  }
}
